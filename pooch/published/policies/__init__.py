"""The published methods as policies, related ones in one file; docs/methods.md lists what comes from the papers."""
