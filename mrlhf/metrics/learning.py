"""The rows of what is learned: scores, losses, values, lengths and held-out answers."""

from __future__ import annotations

from mrlhf.metrics.metric import SAME, Chapter, Metric

_NATS = "nats/token"

# fmt: off
# A row a metric: name; how it is reduced, over what; unit; meaning.
SCORES = Chapter(
    "Scores and rewards",
    "Those below `critic/` exist without a critic, too.",
    Metric("critic/score/mean", "mean", "responses", "score",
           "score before shaping and KL, with the rewards of turns",
           label="reward", curve=True, verl=SAME),
    Metric("critic/score/{max,min}", "named", "responses", "score", "the same", verl=SAME),
    Metric("critic/rewards/{mean,max,min}", "named", "responses", "score",
           "score after shaping, less the KL", verl=SAME),
    Metric("critic/greedy_score/mean", "mean", "prompts", "score",
           "`remax`: score of the greedy response"),
    Metric("reward/<term>", "mean", "responses", "score",
           "a term, or a further number of its function; of responses that have it"),
    Metric("judge/{prompt,completion}_tokens", "mean", "responses", "tokens",
           "a judge that is a server: tokens of messages and answers that were asked for"),
    Metric("judge/{cache_hits,unparsed}", "mean", "responses", "share",
           "answers of a judge that were known before; that hold no verdict"),
    Metric("gdpo/<term>/{mean,std,max,min}", "named", "responses", "score",
           "`gdpo`: a term compared by itself; `std` is that of the batch, no estimate",
           verl=SAME),
    Metric("training/equal_scores", "whole", "", "0 or 1",
           "whether all scores are equal; missing for one response", below=1.0),
    Metric("training/equal_groups", "mean", "prompts", "share",
           "prompts whose responses score the same; missing if none are compared", below=0.95),
)

POLICY = Chapter(
    "Update of the policy",
    "Means leave out what is not finite in a skipped step.",
    Metric("actor/ppo_kl", "mean", "tokens", _NATS,
           "old − current log-probability: how far a step moves the policy",
           below=0.3, label="kl to old", curve=True, verl=SAME),
    Metric("actor/approx_kl", "mean", "tokens", _NATS, "the same"),
    Metric("actor/reward_kl_penalty", "mean", "responses", _NATS,
           "`algorithm.use_kl_in_reward`: KL to the reference",
           below=1.0, label="kl to reference", curve=True, verl=SAME),
    Metric("actor/reward_kl_penalty_coeff", "whole", "", "score/nat",
           "its coefficient", verl=SAME),
    Metric("actor/kl_loss", "mean", "mini-batches", _NATS,
           "`actor.use_kl_loss`: KL to the reference, aggregated as the loss",
           below=1.0, label="kl to reference in loss", curve=True, verl=SAME),
    Metric("actor/entropy", "mean", "tokens", _NATS,
           "of the sampling distribution, before the update; in bypass mode during it",
           curve=True, verl=SAME),
    Metric("actor/pg_loss", "mean", "mini-batches", "loss", "policy loss", verl=SAME),
    Metric("actor/pg_clipfrac", "mean", "tokens", "share",
           "tokens whose loss is the clipped one",
           below=0.5, curve=True, verl=SAME),
    Metric("actor/pg_clipfrac_lower", "mean", "tokens", "share",
           "tokens under the dual clip", verl=SAME),
    Metric("actor/distillation_kl", "mean", "mini-batches", _NATS,
           "`teacher`: divergence from the teacher, aggregated as the loss; with "
           "`algorithm.distillation.mode` reward the mean of log(policy / teacher)"),
    Metric("actor/positive_lm_loss", "mean", "mini-batches", _NATS,
           "`actor.positive_lm_coef`: −log-likelihood of right responses"),
    Metric("actor/kl_stopped", "whole", "", "0 or 1",
           "`actor.target_kl_stop`: whether the update ended early"),
    Metric("actor/kl_at_stop", "mean", "tokens", _NATS,
           "`actor/ppo_kl` of the mini-batch that ended it"),
)

CRITIC = Chapter(
    "Advantages, returns and the critic",
    "Of the tokens whose loss counts.",
    Metric("critic/{advantages,returns}/{mean,max,min}", "named", "tokens", "score",
           "advantages as the update uses them; returns",
           verl=SAME),
    Metric("critic/values/{mean,max,min}", "named", "tokens", "score",
           "predictions before the update", verl=SAME),
    Metric("critic/vf_explained_var", "whole", "", "share",
           "1 − var(returns − values) / var(returns)", above=0.1, curve=True, verl=SAME),
    Metric("critic/vf_loss", "mean", "mini-batches", "loss", "value loss", verl=SAME),
    Metric("critic/vf_clipfrac", "mean", "tokens", "share",
           "tokens whose clipped value was taken", verl=SAME),
    Metric("critic/vpred_mean", "mean", "tokens", "score",
           "predictions in the update", verl=SAME),
)

PAIRS = Chapter(
    "Losses of the other programs",
    "DPO's are TRL's, without `dpo/`.",
    Metric("sft/loss", "mean", "tokens", _NATS,
           "−log-likelihood of response tokens",
           label="loss", curve=True, verl="train/loss"),
    Metric("{rm,dpo}/loss", "mean", "pairs", "loss",
           "loss of the program", label="loss", curve=True),
    Metric("rm/accuracy", "mean", "pairs", "share",
           "pairs whose chosen response scores higher", label="accuracy", curve=True),
    Metric("rm/margin", "mean", "pairs", "score",
           "score of the chosen − the rejected response", curve=True),
    Metric("rm/centring", "mean", "pairs", "score²",
           "`rm.centring`: (score of the chosen + the rejected response)²", curve=True),
    Metric("dpo/rewards/{chosen,rejected}", "mean", "pairs", "score",
           "β·log(policy / reference) of the response", curve=True),
    Metric("dpo/rewards/accuracies", "mean", "pairs", "share",
           "pairs whose chosen response has more reward", label="accuracy", curve=True),
    Metric("dpo/rewards/margins", "mean", "pairs", "score",
           "reward of the chosen − the rejected response",
           label="margin", curve=True),
    Metric("dpo/logps/{chosen,rejected}", "mean", "pairs", "nats",
           "log-probability of the response; if `chosen` falls, the policy leaves both",
           curve=True),
)

LENGTHS = Chapter(
    "Lengths",
    "",
    Metric("response_length/mean", "mean", "responses", "tokens",
           "length of a response", label="length", curve=True, verl=SAME),
    Metric("response_length/{max,min}", "named", "responses", "tokens", "the same", verl=SAME),
    Metric("response_length/clip_ratio", "mean", "responses", "share",
           "responses that the length limit ended", below=0.25, verl=SAME),
    Metric("response_length_non_aborted/{mean,max,min}", "named", "responses", "tokens",
           "of responses that have a token", verl=SAME),
    Metric("response_length_non_aborted/clip_ratio", "mean", "responses", "share",
           "of those, ended by the length limit", verl=SAME),
    Metric("response/aborted_ratio", "mean", "responses", "share",
           "responses without a token", verl=SAME),
    Metric("prompt_length/{mean,max,min}", "named", "responses", "tokens",
           "length of a response's prompt", verl=SAME),
    Metric("prompt_length/clip_ratio", "mean", "responses", "share",
           "prompts as long as `data.max_prompt_length`", verl=SAME),
)

_SPLITS = "{val,val_sampled,test,test_sampled}"

HELD_OUT = Chapter(
    "Held-out rows",
    "`val` is of `data.val_files`, `test` of `data.test_files`; answers are greedy, with "
    "`_sampled` sampled ([algorithms.md](algorithms.md#validation)). verl puts some names under "
    "`val-aux`.",
    Metric(f"{_SPLITS}/<data_source>/reward_mean", "mean", "responses", "score",
           "score of a response", verl="val-core/<data_source>/reward/mean@<n>"),
    Metric(f"{_SPLITS}/<data_source>/acc@1", "mean", "responses", "share",
           "right responses, if a term tells right from wrong",
           verl="val-core/<data_source>/acc/mean@<n>"),
    Metric(f"{_SPLITS}/<data_source>/acc_unknown", "sum", "responses", "responses",
           "of which no term says whether they are right"),
    Metric("{val,test}/<data_source>/pass@<n>", "mean", "prompts", "share",
           "with a right answer among `<n>` samples",
           verl="val-core/<data_source>/acc/best@<n>/mean"),
    Metric("{val,test}/<data_source>/maj@<n>", "mean", "prompts", "share",
           "whose most frequent answer is right",
           verl="val-core/<data_source>/acc/maj@<n>/mean"),
    Metric("val/loss", "mean", "tokens or pairs", "loss",
           "SFT, reward model, DPO: loss", verl=SAME),
    Metric("val/accuracy", "mean", "pairs", "share", "as `rm/accuracy`"),
    Metric("val/rewards/{chosen,rejected,margins}", "mean", "pairs", "score",
           "as `dpo/rewards/...`"),
    Metric("val/rewards/accuracies", "mean", "pairs", "share", "as `dpo/rewards/accuracies`"),
    Metric("se/<held-out mean>", "whole", "", "as the mean",
           "its standard error, from the held-out rows; of the metric by which a run is judged"),
    Metric("val/logps/{chosen,rejected}", "mean", "pairs", "nats", "as `dpo/logps/...`"),
)
