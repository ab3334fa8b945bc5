"""Fused attention with tables and lanes. Filled in by the commits that follow."""
