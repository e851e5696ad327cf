"""Labels of nodes as one setting: `key=value`, several separated by commas."""


def parse_labels(text: str) -> dict[str, str]:
    """The labels of `text`; none for the empty text. Raises `ValueError` for what is no label."""
    labels: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f'{part!r} is no label; write key=value, like "pearl.zone=elastic"')
        labels[key.strip()] = value.strip()
    return labels
