"""mrlhf: reinforcement learning from human feedback on Megatron-style model parallelism.

Importing the package lets CPU stand-ins for megatron-core be installed if there is no GPU, so it
must come before any import of megatron. It does not import torch, which takes seconds. All modules
that use megatron are inside the package.
"""

# First of all: it notes the launcher, and a signal may come while torch is imported.
from mrlhf.run.leaving import end_on_signals, is_launcher

if is_launcher():
    end_on_signals()

from mrlhf.host.finder import install_cpu_stand_ins
from mrlhf.host.light_transformers import lighten_transformers
from mrlhf.version import __version__ as __version__

install_cpu_stand_ins()
lighten_transformers()
