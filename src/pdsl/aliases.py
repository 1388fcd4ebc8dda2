"""Names that other libraries have for a setting, for error messages that say what was probably meant."""

ALIASES: dict[str, str] = {
    "rounds": "epoch epochs num_epochs n_epochs num_rounds n_rounds iterations num_iterations iters steps max_steps",
    "seed": "random_seed random_state manual_seed",
    "evaluate_every": "eval_every eval_interval evaluation_interval",
    "checkpoint_every": "save_every checkpoint_interval",
    "ema_decay": "ema ema_beta",
    "data.name": "dataset data_set",
    "data.validation": "val_size validation_size public_size",
    "data.test_fraction": "test_size test_split",
    "partition.kind": "split non_iid heterogeneity",
    "partition.mu": "alpha dirichlet_alpha concentration",
    "graph.kind": "topology network",
    "graph.agents": "clients num_clients n_clients num_agents n_agents nodes num_nodes num_peers",
    "model.name": "arch architecture",
    "model.hidden": "hidden_size hidden_dim width",
    "task.loss": "loss_fn loss_function criterion objective",
    "task.metric": "metrics metric_fn",
    "task.class_weights": "class_weight weights",
    "batch.size": "batch_size batchsize bs minibatch_size",
    "batch.rate": "sample_rate sampling_rate",
    "algorithm.name": "optimizer optimiser optim algo method strategy aggregator",
    "algorithm.learning_rate": "lr eta gamma step_size stepsize learningrate",
    "algorithm.schedule.kind": "schedule scheduler lr_schedule lr_scheduler",
    "algorithm.schedule.warmup": "warmup_rounds warmup_steps warmup_epochs",
    "privacy.mode": "dp private",
    "privacy.target_epsilon": "epsilon eps target_eps total_epsilon budget privacy_budget",
    "privacy.delta": "target_delta",
    "privacy.max_grad_norm": "clip clip_norm clipping_norm max_norm grad_clip grad_norm_clip l2_norm_clip",
    "privacy.noise_multiplier": "noise_scale noise_std",
    "privacy.randomness": "secure_mode secure_rng",
    "attack.label_flip": "attackers byzantine malicious",
    "engine.device": "gpu cuda",
    "engine.workers": "threads num_threads num_workers n_jobs",
}
# Names without a counterpart, and why
NO_SETTING = {
    "participation": "every agent takes part in every round",
    "client_fraction": "every agent takes part in every round",
    "fraction_fit": "every agent takes part in every round",
}
ALIASED = {alias: setting for setting, aliases in ALIASES.items() for alias in aliases.split()}  # setting by alias
