"""mrlhf: reinforcement learning from human feedback on Megatron-style model parallelism.

Importing the package installs the CPU stand-ins for megatron-core where there is no GPU, so it must
precede any import of megatron; the modules that use megatron are inside the package, which sees to
that.
"""

from mrlhf.device import install_cpu_stand_ins

install_cpu_stand_ins()
