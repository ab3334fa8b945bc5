"""What transformers over grids of patches share, whatever the grid shows."""
