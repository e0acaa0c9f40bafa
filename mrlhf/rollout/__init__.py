"""All replicas of the inference engine as one generator, and the scoring of its responses."""
