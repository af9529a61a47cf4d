"""Where the agent acts. Standard library only."""
