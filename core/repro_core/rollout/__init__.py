"""Where rollouts come from: rollout engines behind one interface, and the way of weights from the trainer to them.

`engine` is the interface. `source` has the one that samples with the trainer's own weights. `sglang_*` sample with
SGLang: an engine in this process, or a server at an address. `sync` brings weights to an engine and shows an observer
what was sent and what the engine holds.

The data's way: `source.RolloutSource.sample` -> `sync.WeightSync.bring` (its observer is the instrument's judge) ->
`engine.RolloutEngine.generate` -> a `Rollout`, to whose meta the instrument adds ``weights``.
"""
