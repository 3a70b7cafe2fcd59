"""GPT-2's byte alphabet: a printable character for each of the 256 bytes, so that vocabularies are readable."""


def _byte_to_character() -> tuple[str, ...]:
    """Maps visible Latin-1 characters to themselves, and the other bytes to characters from U+0100 upwards."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters = []
    borrowed = 0
    for byte in range(256):
        if byte in visible:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + borrowed))
            borrowed += 1
    return tuple(characters)


CHARACTER_OF_BYTE: tuple[str, ...] = _byte_to_character()
BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}
SPACE = CHARACTER_OF_BYTE[ord(" ")]


def token_bytes(token: str) -> bytes:
    """Returns the bytes of a token. A token outside the alphabet, such as a special one, yields its own text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
