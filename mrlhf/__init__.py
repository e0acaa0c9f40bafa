"""mrlhf: reinforcement learning from human feedback on Megatron-style model parallelism.

If there is no GPU, importing the package sets what torch reads of the environment and installs the
CPU stand-ins for megatron-core, so it must come before torch's first tensor and before any import
of megatron. All modules that use megatron are inside the package.
"""

import mrlhf.run.leaving  # noqa: F401 (before torch, which takes seconds: it notes the launcher)
from mrlhf.device import set_variables_of_torch
from mrlhf.stand_ins import install_cpu_stand_ins

set_variables_of_torch()
install_cpu_stand_ins()
