"""The keys that a policy loss is said to read are those that it reads.

By them a key without effect is refused; the refusals are rows of `refusals.txt`.
"""

from dataclasses import replace

import torch

from mrlhf.rl.policy_losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOptions, policy_loss
from tests.unit.configurations import ppo

OPTIONS = {  # of the policy losses, by the key that sets them
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "clip_c",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "ppo_kl_coef": "ppo_kl_coef",
}


def test_a_loss_reads_exactly_the_keys_that_it_is_said_to_read():
    generator = torch.Generator().manual_seed(5)
    shape = (6, 12)
    inputs = PolicyLossInputs(
        logprob=-torch.rand(shape, generator=generator) * 3,
        old_logprob=-torch.rand(shape, generator=generator) * 3,
        advantages=torch.randn(shape, generator=generator),
        mask=torch.ones(shape, dtype=torch.bool),
        selected=torch.rand(shape, generator=generator) < 0.5,
    )

    for name, function in POLICY_LOSSES.items():
        chosen = {"actor__policy_loss__loss_mode": name}
        if name == "reinforce":
            chosen = {"algorithm__rollout_correction": {"preset": "bypass_pg_is"}}
        config = ppo(**chosen)
        loss = policy_loss(function, inputs, PolicyLossOptions()).per_token
        for key, option in OPTIONS.items():
            moved = replace(PolicyLossOptions(), **{option: 1.5})
            read = not torch.equal(policy_loss(function, inputs, moved).per_token, loss)
            section = "actor.policy_loss" if key == "ppo_kl_coef" else "actor"
            assert read == config.reads(f"{section}.{key}"), (
                f"{name} {'reads' if read else 'does not read'} {section}.{key}; say so in by_loss "
                "beside the key, in mrlhf/config/sections.py"
            )
