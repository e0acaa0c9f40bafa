"""All replicas of the inference engine as one generator, and what turns responses into scores."""
