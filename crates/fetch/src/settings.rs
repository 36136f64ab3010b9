//! Settings that messages name.

use crate::UrlOptions;

omnigrpo_guard::settings! {
    ALLOW_PRIVATE = UrlOptions.allow_private;
}
