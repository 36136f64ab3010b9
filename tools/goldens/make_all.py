"""Writes everything under crates/models/tests/golden; a second run gives the same bytes on the same machine."""

import fixtures
import make_aria
import make_cases
import make_checkpoints
import make_decoders
import make_internvl
import make_lora
import make_encoders
import make_humanomni
import make_omni
import make_packed
import make_positions
import make_published
import make_qwen3_5
import make_qwen3_vl
import make_replay
import make_rope
import make_scorers
import make_smolvlm
import make_text

if __name__ == "__main__":
    fixtures.make_media()
    make_checkpoints.main()
    make_positions.main()
    make_cases.main()
    make_packed.main()
    make_replay.main()
    make_rope.main()
    make_decoders.main()
    make_internvl.main()
    make_aria.main()
    make_smolvlm.main()
    make_qwen3_vl.main()
    make_qwen3_5.main()
    make_lora.main()
    make_published.main()
    make_encoders.main()
    make_humanomni.main()
    make_omni.main()
    make_scorers.main()
    make_text.main()
