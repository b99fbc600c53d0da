"""One file for each paper. `locant.names()` walks this folder: a new file needs no entry anywhere."""
