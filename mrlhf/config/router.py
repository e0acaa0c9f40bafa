"""The keys of the losses of routers, which every role that is trained has.

They do not know other keys.
"""

from __future__ import annotations

from pydantic import Field

from mrlhf.config.fields import NotNegative, Section


class RouterSection(Section):
    """What is added to the loss for the routers of a mixture of experts."""

    router_balance_coef: NotNegative = Field(
        0.0,
        description="mixture of experts: weight of the load-balancing loss of each layer, a mean "
        "over sequences that is 1 where all experts get equally much; 0: none",
    )
    router_z_coef: NotNegative = Field(
        0.0,
        description="mixture of experts: weight of the mean square of the log-sum-exp of each "
        "layer's router logits; 0: none",
    )
