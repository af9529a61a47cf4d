"""Tasks from real repositories, and what defends them. Standard library only."""
