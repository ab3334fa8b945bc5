"""Letters in fonts: alone in scenes with clutter, and in crowds over photographs."""
