//! Settings that messages name.

use crate::RewardOptions;

omnigrpo_guard::settings! {
    ACCURACY_MODE = RewardOptions.accuracy_mode;
    FORMAT_MODE = RewardOptions.format_mode;
    MAX_COMPLETION_TOKENS = RewardOptions.max_completion_tokens;
}
