"""storage/codecs/device."""
