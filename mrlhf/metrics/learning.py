"""The rows of what is learned: scores, losses, values, lengths and held-out answers."""

from __future__ import annotations

from mrlhf.metrics.metric import SAME, Chapter, Metric

_NATS = "nats a token"

# fmt: off
# A row a metric: name; how it is reduced, over what; unit; meaning.
SCORES = Chapter(
    "Scores and rewards",
    "Names below `critic/` are verl's. Scores, rewards, advantages and returns are those of every "
    "method and exist without a critic.",
    Metric("critic/score/mean", "mean", "responses", "score",
           "the score of a response, before shaping and KL", label="reward", curve=True, verl=SAME),
    Metric("critic/score/{max,min}", "named", "responses", "score", "the same", verl=SAME),
    Metric("critic/rewards/{mean,max,min}", "named", "responses", "score",
           "the score after shaping, less the KL", verl=SAME),
    Metric("critic/greedy_score/mean", "mean", "prompts", "score",
           "with `remax`: the score of the greedy response to a prompt"),
    Metric("reward/<term>", "mean", "responses", "score",
           "a term of the reward, or a further number that its function returns; of the responses "
           "that have it"),
    Metric("gdpo/<term>/{mean,std,max,min}", "named", "responses", "score",
           "with `gdpo`: a term of the reward that is compared by itself; the standard deviation "
           "is that of the batch, not an estimate", verl=SAME),
    Metric("training/equal_scores", "whole", "", "0 or 1",
           "1 if all scores are equal; missing for a batch of one response", below=1.0),
    Metric("training/equal_groups", "mean", "prompts", "share",
           "the prompts whose responses all have equal scores; missing if the estimator does not "
           "compare them, or if a prompt has one response", below=0.95),
)

POLICY = Chapter(
    "Update of the policy",
    "What is not finite in an optimizer step that was skipped is left out of the means.",
    Metric("actor/ppo_kl", "mean", "tokens", _NATS,
           "old − current log-probability in the update: how far one step moves the policy",
           below=0.3, label="kl to old", curve=True, verl=SAME),
    Metric("actor/approx_kl", "mean", "tokens", _NATS, "another name of `actor/ppo_kl`"),
    Metric("actor/reward_kl_penalty", "mean", "responses", _NATS,
           "with `algorithm.use_kl_in_reward`: the mean KL to the reference in a response",
           below=1.0, label="kl to reference", curve=True, verl=SAME),
    Metric("actor/reward_kl_penalty_coeff", "whole", "", "score a nat",
           "the coefficient of that KL in this step", verl=SAME),
    Metric("actor/kl_loss", "mean", "mini-batches", _NATS,
           "with `actor.use_kl_loss`: the KL to the reference, aggregated as the loss is",
           below=1.0, label="kl to reference in loss", curve=True, verl=SAME),
    Metric("actor/entropy", "mean", "tokens", _NATS,
           "the entropy of the distribution that a token was drawn from, before the update; in "
           "bypass mode during it", curve=True, verl=SAME),
    Metric("actor/pg_loss", "mean", "mini-batches", "loss", "the policy loss", verl=SAME),
    Metric("actor/pg_clipfrac", "mean", "tokens", "share",
           "the tokens for which the clipped branch of the loss was taken",
           below=0.5, curve=True, verl=SAME),
    Metric("actor/pg_clipfrac_lower", "mean", "tokens", "share",
           "the tokens for which the dual clip was taken", verl=SAME),
    Metric("actor/positive_lm_loss", "mean", "mini-batches", "nats a token",
           "with `actor.positive_lm_coef`: the negative log-likelihood of right responses"),
    Metric("actor/kl_stopped", "whole", "", "0 or 1",
           "with `actor.target_kl_stop`: 1 if the update ended early"),
    Metric("actor/kl_at_stop", "mean", "tokens", _NATS,
           "`actor/ppo_kl` of the mini-batch at which the update ended early"),
)

CRITIC = Chapter(
    "Advantages, returns and the critic",
    "Of the tokens whose loss counts. `critic/values` and `critic/vf_*` exist only with a critic.",
    Metric("critic/{advantages,returns}/{mean,max,min}", "named", "tokens", "score",
           "advantages as the update of the policy uses them, and the returns of tokens",
           verl=SAME),
    Metric("critic/values/{mean,max,min}", "named", "tokens", "score",
           "the critic's predictions before the update", verl=SAME),
    Metric("critic/vf_explained_var", "whole", "", "share",
           "the share of the returns' variance that the critic explains: 1 − var(returns − values) "
           "/ var(returns)", above=0.1, curve=True, verl=SAME),
    Metric("critic/vf_loss", "mean", "mini-batches", "loss", "the value loss", verl=SAME),
    Metric("critic/vf_clipfrac", "mean", "tokens", "share",
           "the tokens for which the clipped value was taken", verl=SAME),
    Metric("critic/vpred_mean", "mean", "tokens", "score",
           "the critic's prediction in its update", verl=SAME),
)

PAIRS = Chapter(
    "Losses of the other programs",
    "DPO's are TRL's, without `dpo/`.",
    Metric("sft/loss", "mean", "tokens", _NATS,
           "fine-tuning: the negative log-likelihood of response tokens",
           label="loss", curve=True, verl="train/loss"),
    Metric("{rm,dpo}/loss", "mean", "pairs", "loss",
           "reward modelling, DPO: the loss", label="loss", curve=True),
    Metric("rm/accuracy", "mean", "pairs", "share",
           "the pairs whose chosen response has the higher score", label="accuracy", curve=True),
    Metric("rm/margin", "mean", "pairs", "score",
           "the score of the chosen response less that of the rejected one", curve=True),
    Metric("dpo/rewards/{chosen,rejected}", "mean", "pairs", "score",
           "β·log(policy / reference) of the whole response, with `ipo` too", curve=True),
    Metric("dpo/rewards/accuracies", "mean", "pairs", "share",
           "the pairs whose chosen response has the higher reward", label="accuracy", curve=True),
    Metric("dpo/rewards/margins", "mean", "pairs", "score",
           "the reward of the chosen response less that of the rejected one",
           label="margin", curve=True),
    Metric("dpo/logps/{chosen,rejected}", "mean", "pairs", "nats",
           "the log-probability of the whole response. If that of the chosen ones falls, the "
           "policy moves away from both", curve=True),
)

LENGTHS = Chapter(
    "Lengths",
    "",
    Metric("response_length/mean", "mean", "responses", "tokens",
           "the length of a response", label="length", curve=True, verl=SAME),
    Metric("response_length/{max,min}", "named", "responses", "tokens", "the same", verl=SAME),
    Metric("response_length/clip_ratio", "mean", "responses", "share",
           "the responses that the length limit ended", below=0.25, verl=SAME),
    Metric("response_length_non_aborted/{mean,max,min}", "named", "responses", "tokens",
           "the length of a response that has a token", verl=SAME),
    Metric("response_length_non_aborted/clip_ratio", "mean", "responses", "share",
           "of the responses that have a token, those that the length limit ended", verl=SAME),
    Metric("response/aborted_ratio", "mean", "responses", "share",
           "the responses that have no token", verl=SAME),
    Metric("prompt_length/{mean,max,min}", "named", "responses", "tokens",
           "the length of a response's prompt", verl=SAME),
    Metric("prompt_length/clip_ratio", "mean", "responses", "share",
           "the prompts as long as `data.max_prompt_length`", verl=SAME),
)

_SPLITS = "{val,val_sampled,test,test_sampled}"

HELD_OUT = Chapter(
    "Held-out rows",
    "`val/` is of the validation, `test/` of `data.test_files`; `val_sampled/` and "
    "`test_sampled/` are of sampled answers, the others of greedy ones. "
    "[algorithms.md](algorithms.md#validation) says when each is measured. verl puts some of "
    "these names under `val-aux`.",
    Metric(f"{_SPLITS}/<data_source>/reward_mean", "mean", "responses", "score",
           "the score of a response", verl="val-core/<data_source>/reward/mean@<n>"),
    Metric(f"{_SPLITS}/<data_source>/acc@1", "mean", "responses", "share",
           "the right responses, if a term of the reward tells right from wrong",
           verl="val-core/<data_source>/acc/mean@<n>"),
    Metric(f"{_SPLITS}/<data_source>/acc_unknown", "sum", "responses", "responses",
           "the responses of which no term says whether they are right, if there are any"),
    Metric("{val,test}/<data_source>/pass@<n>", "mean", "prompts", "share",
           "the prompts with a right answer among `<n>` sampled ones",
           verl="val-core/<data_source>/acc/best@<n>/mean"),
    Metric("{val,test}/<data_source>/maj@<n>", "mean", "prompts", "share",
           "the prompts whose most frequent answer among `<n>` sampled ones is right",
           verl="val-core/<data_source>/acc/maj@<n>/mean"),
    Metric("val/loss", "mean", "tokens or pairs", "loss",
           "fine-tuning, reward modelling, DPO: the loss", verl=SAME),
    Metric("val/accuracy", "mean", "pairs", "share", "reward modelling: as `rm/accuracy`"),
    Metric("val/rewards/{chosen,rejected,margins}", "mean", "pairs", "score",
           "DPO: as `dpo/rewards/...`"),
    Metric("val/rewards/accuracies", "mean", "pairs", "share", "DPO: as `dpo/rewards/accuracies`"),
    Metric("val/logps/{chosen,rejected}", "mean", "pairs", "nats", "DPO: as `dpo/logps/...`"),
)
