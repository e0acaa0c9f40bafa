"""Episodes of several turns: what draws them, and what stands between two turns."""
