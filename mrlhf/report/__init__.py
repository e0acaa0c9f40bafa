"""The report of runs: one HTML file, made of what they left in their directories."""
