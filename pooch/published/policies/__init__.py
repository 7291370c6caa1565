"""The published methods as policies, one file each; docs/methods.md lists what comes from the papers."""
