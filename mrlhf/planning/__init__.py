"""Layouts for a configuration: what each takes of a GPU's memory, and how long a step may take.

Nothing is built and no device is needed. `gpus` says what a GPU can do, `seconds` estimates times,
and `search` tries layouts; bytes are added up in `mrlhf.preflight.footprint`.
"""
