"""What attention with positions costs, as ratios to plain attention measured in the same run."""
