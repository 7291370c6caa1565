"""The published methods as policies, one file each; what is theirs and what is ours is in docs/methods.md."""
