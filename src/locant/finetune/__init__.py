"""Fine-tune a pretrained model on GLUE or SQuAD with any position encoding, and score it as the official scorers do."""
