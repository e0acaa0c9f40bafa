"""The mathematics of PPO as pure functions of tensors and floats.

It knows no models, no ranks and no configuration.
"""
