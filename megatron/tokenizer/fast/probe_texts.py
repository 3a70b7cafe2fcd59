"""Probe texts: texts that each once broke some tokenizer, and texts made from the vocabulary."""

import unicodedata
from collections.abc import Iterator, Mapping

from megatron.tokenizer.byte_alphabet import token_bytes

EDGE_CASES = (
    "",
    " ",
    "  \n\t ",
    "\n\n\n",
    "a  b\ta \n b   \n\n  c",
    "\r\n\r\n x\r\r\n \r",
    "don't we'LL they'Re I'M she'D it'S 'tis ''s 's'S'ſ'T a's'll'LL'lL'v'VE'r'RE",
    "\u2019s\u2019S \u02bcs it\u2019s",
    "x" * 300 + "Xy" * 40,
    " x" * 50 + " " * 70 + "\n" * 70 + "\t" * 70 + "=" * 70 + "0" * 70,
    "<|endoftext|> before <|endoftext|>after<|endoftext|><s></s>[UNK]<pad><0x0A>\u2581a",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\xa0\u1680\u180e\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
    "\x00a \x1ca\x1c \x85a\x85 \xa0a\xa0 \u3000a\u3000 \u200ba\u200b \u2028a\u2028\n\u2029\r",
    "e\u0301\u0301\u0301 \u0301 a\u0308\u0301 \u1100\u1161\u11a8 \uac00\u11a8 \u0958 \u212b \u2126",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3fd\U0001f1e9\U0001f1ea a\ufe0f\u20e3",
    "\u0661\u0662\u0663\u0664 \u2167 \xb2 \xbd \u2460 12a3 1234567 3.14159 1,000,000 0x1F 1e-9 \u0967\u0968",
    "\U0010ffff\ue000\ufffe\uffff\ufffd\U000f0000",
    "\ufb01 \ufdfd \U0001d518\U0001d52b \u01c5\u01c8 \u0130\u0131 \xdf\u1e9e \u017f\u212a",
    "camelCaseWord HTTPServer XMLHttpRequest iPhone A1b2C3 snake_case __init__ -- ++ == != /* */ // #!/",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002\u30ab\u30bf\u30ab\u30ca\uff01\ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "def f(x):\n    return {'a': [1, 2.5e3], \"b\": x**2}  # comment\n\n\n\tif x!=None:\r\n\t\tpass\n",
)
TOKENS_TRIED = 1500
CHARACTER_STEP = 61  # one in this many characters of the first two planes is tried, if assigned


def probe_texts(vocab: Mapping[str, int]) -> Iterator[str]:
    yield from EDGE_CASES
    yield from _ascii_pairs()
    yield from _characters()
    yield from _tokens(vocab)


def _ascii_pairs() -> Iterator[str]:
    """Yields pairs of printable or white ASCII characters."""
    characters = "\t\n\r" + "".join(map(chr, range(32, 127)))
    kinds = "\n\r aZ0_'/!\t"
    yield from ("".join(first + second for second in characters) for first in kinds)
    yield from ("".join(second + first + " " for second in characters) for first in kinds)


def _characters() -> Iterator[str]:
    """Yields a sample of characters, each between a letter, a digit, a mark and white space."""
    sample = [chr(code) for code in range(0xA0, 0x20000, CHARACTER_STEP)]
    assigned = [character for character in sample if unicodedata.category(character) not in ("Cn", "Cs", "Co")]
    for start in range(0, len(assigned), 50):
        yield "".join(f"a{c}1{c}!{c} {c}\n{c}" for c in assigned[start : start + 50])


def _tokens(vocab: Mapping[str, int]) -> Iterator[str]:
    """Yields tokens of the vocabulary, joined with and without spaces."""
    step = max(1, len(vocab) // TOKENS_TRIED)
    tried = [token_bytes(token).decode("utf-8", errors="ignore") for token in list(vocab)[::step]]
    for start in range(0, len(tried), 50):
        part = tried[start : start + 50]
        yield "".join(part)
        yield " ".join(part)
