"""mrlhf: reinforcement learning from human feedback on Megatron-style model parallelism.

Importing the package installs the CPU stand-ins for megatron-core if there is no GPU, so it must
come before any import of megatron. All modules that use megatron are inside the package, so this is
always so.
"""

import mrlhf.run.leaving  # noqa: F401 (before torch, which takes seconds: it notes the launcher)
from mrlhf.device import install_cpu_stand_ins

install_cpu_stand_ins()
