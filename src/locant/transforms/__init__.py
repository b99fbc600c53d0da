"""One file for each transform of position ids. ``locant.names("transforms")`` walks this folder."""
