"""Tables (rich, pandas), figures (matplotlib) and trace export. Reports never import commands."""
