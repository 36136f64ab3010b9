"""Writes everything under crates/models/tests/golden; a second run gives the same bytes on the same machine."""

import fixtures
import make_cases
import make_checkpoints

if __name__ == "__main__":
    fixtures.make_media()
    make_checkpoints.main()
    make_cases.main()
