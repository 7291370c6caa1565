"""All that is about papers: their methods as policies, their networks, experiments and figures, and their command."""
