"""The mathematics of PPO as pure functions of tensors and floats; knows no models, ranks or
configuration.
"""
