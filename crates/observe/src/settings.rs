//! Settings that messages name.

omnigrpo_guard::settings! {
    LEARNING_RATE = AdamWConfig: learning_rate;
    BETA = Algorithm: loss.beta;
    CORRECTION = Algorithm: loss.correction.kind;
    ENTROPY_COEF = Algorithm: loss.entropy_coef;
    NUM_GENERATIONS = Algorithm: num_generations;
    CURRICULUM = RunPlan: lessons.curriculum;
    HIGH = RunPlan: lessons.high;
    MAX_STEPS = RunPlan: max_steps;
    MAX_COMPLETION_LENGTH = SamplingParams: max_completion_length;
    TEMPERATURE = SamplingParams: temperature;
    REWARDS = TrainSetup: rewards;
}
