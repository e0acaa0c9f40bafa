"""mrlhf: reinforcement learning from human feedback on Megatron-style model parallelism.

If there is no GPU, importing the package sets what torch reads of the environment and installs the
CPU stand-ins for megatron-core, so it must come before torch's first tensor and before any import
of megatron. All modules that use megatron are inside the package.
"""

# Before torch, which takes seconds: it notes the launcher, and a signal may come.
from mrlhf.run.leaving import end_on_signals, is_launcher

if is_launcher():
    end_on_signals()

from mrlhf.device import set_variables_of_torch
from mrlhf.host.stand_ins import install_cpu_stand_ins
from mrlhf.version import __version__ as __version__

set_variables_of_torch()
install_cpu_stand_ins()
