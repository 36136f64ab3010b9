"""Comparison of a processor with the one of the checkpoint, which a run reads."""

# They have no effect here: nothing is padded or truncated, and messages name the template's own path.
_IDLE = ("pad_token", "padding_side", "truncation_side", "processor_class", "image_processor_type", "video_processor_type", "_processor_class")


def changed(processor):
    """Return the names of what differs between a processor or a tokenizer and the files that it was read from."""
    tokenizer = getattr(processor, "tokenizer", processor)
    place = getattr(tokenizer, "name_or_path", None)
    if not place or not hasattr(type(processor), "from_pretrained"):
        return []
    original = type(processor).from_pretrained(place)
    found = []
    for part in ("", "tokenizer", "image_processor", "video_processor", "feature_extractor"):
        own, their = (getattr(one, part, None) if part else one for one in (processor, original))
        if own is None or their is None:
            continue
        prefix = f"{part}." if part else ""
        if getattr(own, "chat_template", None) != getattr(their, "chat_template", None):
            found.append(f"{prefix}chat_template")
        if hasattr(own, "special_tokens_map"):
            own_map, their_map = own.special_tokens_map, their.special_tokens_map
            found += [prefix + name for name in sorted({*own_map, *their_map}) if name not in _IDLE and own_map.get(name) != their_map.get(name)]
            if own.get_added_vocab() != their.get_added_vocab():
                found.append(f"{prefix}added tokens")
        elif hasattr(own, "to_dict") and part:
            own_map, their_map = own.to_dict(), their.to_dict()
            found += [prefix + name for name in sorted({*own_map, *their_map}) if name not in _IDLE and own_map.get(name) != their_map.get(name)]
    return found
