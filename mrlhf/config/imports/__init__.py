"""Translates the configurations of other systems into ours."""
