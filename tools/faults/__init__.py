"""File operations that fail, processes that are killed in the middle of them, and what must hold afterwards."""
