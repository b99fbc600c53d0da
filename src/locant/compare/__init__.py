"""The main job: encodings x seeds -> runs -> one result table."""
