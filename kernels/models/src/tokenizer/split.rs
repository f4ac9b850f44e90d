//! Pre-tokenizer: splits text into words before merging, with the regular expressions of each family of byte-level
//! vocabularies.
//!
//! Published patterns end in `\s+(?!\S)|\s+`. The look-ahead needs a backtracking engine, which fails on long input and then
//! drops text. Here a linear engine matches and the look-ahead is done by hand: a run of whitespace before other text leaves
//! its last character to that text. No text is dropped: what no pattern matches is a word too.
use std::ops::Range;

use wordchipper::support::regex::{RegexPattern, RegexWrapper};

use super::TokenizerError;

const GPT2: Pattern = Pattern {
    regex: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
    whitespace: Whitespace::LeavesLast,
};
const LLAMA3: Pattern = Pattern {
    regex: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    whitespace: Whitespace::LeavesLastWithinLine,
};
const QWEN2: Pattern = Pattern {
    regex: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    whitespace: Whitespace::LeavesLastWithinLine,
};
const GPT4O: Pattern = Pattern {
    regex: concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
    ),
    whitespace: Whitespace::LeavesLastWithinLine,
};
const TEKKEN: Pattern = Pattern {
    regex: concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
    ),
    whitespace: Whitespace::LeavesLastWithinLine,
};
const DIGIT: Pattern = plain(r"\p{N}");
const DIGITS: Pattern = plain(r"\p{N}+");
const THREE_DIGITS: Pattern = plain(r"[0-9][0-9][0-9]");
const LINE_BREAK: Pattern = plain(r"[\r\n]");
const SPACED_LETTERS: Pattern = plain(r"\s?\p{L}+");
const SPACED_PUNCTUATION: Pattern = plain(r"\s?\p{P}+");
const EAST_ASIAN: Pattern = plain(r"[\u{4e00}-\u{9fa5}\u{0800}-\u{4e00}\u{ac00}-\u{d7ff}]+");
const PUNCTUATION: Pattern = plain(r"[\p{P}\$\+<=>\^~\|]+");
const PUNCTUATION_OR_BACKTICK: Pattern = plain(r"[\p{P}\$\+<=>\^~\|`]+");

/// The pre-tokenizer named by `tokenizer.ggml.pre`.
pub(super) struct Rules {
    /// Applied in order; each splits the pieces of the previous one.
    patterns: &'static [Pattern],
    /// A word that is a token is not merged.
    pub whole_words: bool,
    /// Prompts begin with the beginning-of-text token unless the file specifies otherwise.
    pub add_bos: bool,
    /// Text is normalised to NFC first.
    pub compose: bool,
}

struct Pattern {
    regex: &'static str,
    whitespace: Whitespace,
}

const fn plain(regex: &'static str) -> Pattern {
    Pattern { regex, whitespace: Whitespace::Whole }
}

/// How a whitespace-only match treats its last character if other text follows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whitespace {
    /// Keeps it.
    Whole,
    /// Leaves it to the following text, unless it is the only one: `\s+(?!\S)|\s+`.
    LeavesLast,
    /// As `LeavesLast`, unless it is a line break: `\s*[\r\n]+|\s+(?!\S)|\s+`.
    LeavesLastWithinLine,
}

impl Rules {
    /// The rules for a value of `tokenizer.ggml.pre`; a file without the key uses the oldest, "default".
    pub(super) fn named(pre: Option<&str>) -> Result<Self, TokenizerError> {
        let rules = |patterns| Self { patterns, whole_words: false, add_bos: false, compose: false };
        Ok(match pre.unwrap_or("default") {
            "default" => rules(&[PUNCTUATION, GPT2, DIGITS, THREE_DIGITS]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                rules(&[DIGIT, GPT2])
            }
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "roberta-bpe" => rules(&[GPT2]),
            "falcon" => rules(&[PUNCTUATION_OR_BACKTICK, GPT2, THREE_DIGITS]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" => {
                Self { whole_words: true, add_bos: true, ..rules(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" => rules(&[LLAMA3]),
            "qwen2" | "deepseek-r1-qwen" => Self { compose: true, ..rules(&[QWEN2]) },
            "deepseek-coder" => rules(&[LINE_BREAK, SPACED_LETTERS, SPACED_PUNCTUATION, EAST_ASIAN, DIGIT]),
            "stablelm2" => rules(&[QWEN2]),
            "gpt-4o" | "llama4" => rules(&[GPT4O]),
            "tekken" => Self { whole_words: true, add_bos: true, ..rules(&[TEKKEN]) },
            other => {
                return Err(TokenizerError::Unsupported(format!(
                    "pre-tokenizer {other:?} (tokenizer.ggml.pre); supported: default, smollm, gpt-2, llama-bpe, qwen2, \
                     tekken, gpt-4o, falcon, starcoder, command-r and their aliases"
                )));
            }
        })
    }

    pub(super) fn compile(&self) -> Result<Splitter, TokenizerError> {
        let compile = |p: &Pattern| {
            let regex = RegexPattern::Basic(p.regex.to_owned()).compile();
            Ok((regex.map_err(|e| TokenizerError::Unsupported(e.to_string()))?, p.whitespace))
        };
        Ok(Splitter { steps: self.patterns.iter().map(compile).collect::<Result<_, TokenizerError>>()? })
    }
}

/// Compiled patterns.
pub(super) struct Splitter {
    steps: Vec<(RegexWrapper, Whitespace)>,
}

impl Splitter {
    /// Calls `word` with consecutive, non-empty ranges that cover the text.
    pub(super) fn for_each_word(&self, text: &str, word: &mut dyn FnMut(Range<usize>)) {
        self.step(0, text, 0, word);
    }

    /// Splits `text`, which begins at byte `offset`, with the patterns from index `step` on.
    fn step(&self, step: usize, text: &str, offset: usize, word: &mut dyn FnMut(Range<usize>)) {
        let Some((regex, whitespace)) = self.steps.get(step) else {
            return word(offset..offset + text.len());
        };
        let mut emit = |range: Range<usize>| {
            if !range.is_empty() {
                self.step(step + 1, &text[range.clone()], offset + range.start, word);
            }
        };
        let mut at = 0;
        while at < text.len() {
            let found = match regex {
                RegexWrapper::Basic(regex) => regex.find_at(text, at).map(|m| m.range()),
                // `RegexPattern::Basic` never compiles to this.
                RegexWrapper::Fancy(_) => None,
            };
            let Some(found) = found.filter(|f| !f.is_empty()) else {
                break;
            };
            let end = found.end - whitespace.left_over(&text[found.clone()], &text[found.end..]);
            emit(at..found.start);
            emit(found.start..end);
            at = end;
        }
        emit(at..text.len());
    }
}

impl Whitespace {
    /// Bytes at the end of a match that are left to the following text.
    fn left_over(self, found: &str, after: &str) -> usize {
        let Some(last) = found.chars().next_back() else { return 0 };
        let within_line = self == Self::LeavesLast || !matches!(last, '\r' | '\n');
        let leaves = self != Self::Whole
            && within_line
            && !after.is_empty()
            && found.len() > last.len_utf8()
            && found.chars().all(char::is_whitespace);
        if leaves { last.len_utf8() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::Rules;

    fn words(pre: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        let splitter = Rules::named(Some(pre)).expect("known").compile().expect("valid");
        splitter.for_each_word(text, &mut |r| words.push(text[r].to_owned()));
        words
    }

    #[test]
    fn whitespace_leaves_its_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b \n\nc  "), ["a", "  ", " b", " \n", "\n", "c", "  "]);
        assert_eq!(
            words("llama-bpe", "a   b \n\n  c\t\td  "),
            ["a", "  ", " b", " \n\n", " ", " c", "\t", "\td", "  "]
        );
        assert_eq!(words("smollm", "x  12  3"), ["x", "  ", "1", "2", "  ", "3"]);
        assert_eq!(words("qwen2", "I'LL be 123"), ["I", "'LL", " be", " ", "1", "2", "3"]);
        assert_eq!(words("llama-bpe", "1234567"), ["123", "456", "7"]);
        assert_eq!(words("default", "It's 12345!  ok"), ["It", "'", "s", " ", "123", "45", "!", " ", " ok"]);
    }

    /// 256 KiB without a word boundary are neither dropped nor slow: linear engines have no backtracking limit.
    #[test]
    fn long_runs_are_not_dropped() {
        for pre in ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "default", "falcon"] {
            for unit in [" ", "\n", "x", "1", "!", "\u{301}", "\u{0}", " \n", "日"] {
                let text = unit.repeat((1 << 18) / unit.len()) + "end";
                let mut at = 0;
                let splitter = Rules::named(Some(pre)).expect("known").compile().expect("valid");
                splitter.for_each_word(&text, &mut |r| {
                    assert_eq!(r.start, at);
                    assert!(!r.is_empty());
                    at = r.end;
                });
                assert_eq!(at, text.len(), "{pre} {unit:?}");
            }
        }
    }
}
