//! The tokenizer: encodes text to token ids and decodes them, with the vocabulary in the metadata of the weights file.
//!
//! Byte-level BPE vocabularies use wordchipper, or HF `tokenizers` if one rank per token cannot express their merges.
//! SentencePiece vocabularies use HF `tokenizers`. Special tokens are split off here before either sees the text.
//! Next: `tokenizer/byte_pair.rs`.
use std::collections::BTreeMap;

use crate::weights::error::WeightsError;
use crate::weights::metadata::Metadata;

mod byte_pair;
mod sentence_piece;
mod split;
mod stream;

pub use stream::Decoder;

/// Maximum bytes of text per call: some four million tokens, far above any context length. Bounds the work that a request can
/// cause.
pub const TEXT_BYTES_MAX: usize = 16 << 20;
/// Maximum bytes per token (vocabularies contain runs of up to 256 spaces).
const TOKEN_BYTES_MAX: usize = 4096;
/// Maximum number of tokens: above 262,144, the largest vocabulary in use, with room.
const TOKENS_MAX: usize = 1 << 20;

/// Texts of end-of-generation tokens in various model families; used if the vocabulary has them as control tokens.
const END_TEXTS: [&str; 12] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
    "<EOT>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
];

/// A model's tokenizer. Immutable and `Sync`.
pub struct Tokenizer {
    words: Words,
    vocabulary: Vocabulary,
    specials: Specials,
    bos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    eos: Vec<u32>,
}

/// The encoder of plain text.
enum Words {
    BytePair(Box<byte_pair::BytePair>),
    SentencePiece(Box<sentence_piece::SentencePiece>),
}

/// The type of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    /// Structure, such as the end of a turn. Parsed from text only on request; decodes to nothing.
    Control,
    /// Always matched as a whole.
    UserDefined,
    Unused,
    /// One byte: the fallback for text that no other token covers.
    Byte,
}

/// The vocabulary of the file.
struct Vocabulary {
    /// Spelling in the file.
    texts: Vec<String>,
    kinds: Vec<Kind>,
    /// Bytes that each token decodes to.
    bytes: Vec<Box<[u8]>>,
}

impl Tokenizer {
    /// Builds the tokenizer described by the header's `tokenizer.ggml.*` keys.
    ///
    /// # Errors
    /// [`TokenizerError`]: missing or inconsistent keys, or an unsupported kind of tokenizer.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let model = metadata.text("tokenizer.ggml.model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let mut vocabulary = Vocabulary::read(metadata)?;
        let count = vocabulary.texts.len();
        let (words, default_add_bos) = match model {
            "gpt2" => {
                let (words, add_bos) = byte_pair::BytePair::read(metadata, &mut vocabulary)?;
                (Words::BytePair(Box::new(words)), add_bos)
            }
            "llama" => {
                let words = sentence_piece::SentencePiece::read(metadata, &mut vocabulary)?;
                (Words::SentencePiece(Box::new(words)), true)
            }
            other => {
                return Err(TokenizerError::Unsupported(format!(
                    "tokenizer model {other:?}; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
                )));
            }
        };
        let id = |key: &str| -> Result<Option<u32>, TokenizerError> {
            match metadata.unsigned(key)? {
                None => Ok(None),
                Some(id) if id < count as u64 => Ok(Some(id as u32)),
                Some(id) => Err(TokenizerError::Malformed(format!("{key}: token {id} of a vocabulary of {count}"))),
            }
        };
        let bos = id("tokenizer.ggml.bos_token_id")?;
        let mut eos = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            eos.extend(id(&format!("tokenizer.ggml.{key}"))?);
        }
        eos.extend(vocabulary.control_tokens(&END_TEXTS));
        let mut seen = std::collections::BTreeSet::new();
        eos.retain(|id| seen.insert(*id));
        let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(default_add_bos) && bos.is_some();
        let add_eos = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        let specials = Specials::new(&vocabulary);
        Ok(Self { words, vocabulary, specials, bos, add_bos, add_eos, eos })
    }

    /// Encodes text without adding a beginning-of-text token.
    ///
    /// `parse_special`: whether text that spells a control token (`<|im_start|>`) becomes that token. Right for rendered chat
    /// templates, wrong for untrusted text.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`], or text that the vocabulary's rules cannot encode.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.encode_pieces(text, parse_special, None)
    }

    fn encode_pieces(&self, text: &str, parse_special: bool, mark: Option<char>) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(TokenizerError::TooLong { bytes: text.len() });
        }
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        let plain = |piece: &str, ids: &mut Vec<u32>| match mark {
            Some(mark) if piece.contains(mark) => self.encode_plain(&piece.replace(mark, ""), ids),
            _ => self.encode_plain(piece, ids),
        };
        while let Some((at, id, len)) = self.specials.find(rest, parse_special) {
            plain(&rest[..at], &mut ids)?;
            ids.push(id);
            rest = &rest[at + len..];
        }
        plain(rest, &mut ids)?;
        Ok(ids)
    }

    /// Encodes a prompt: as [`Self::encode`] with control tokens parsed. Prepends the beginning-of-text token if the model
    /// requires one and the prompt does not begin with it.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode(text, true)?;
        Ok(self.with_bos(ids))
    }

    /// As [`Self::encode_prompt`] for text with marks from [`Self::mark_control`]. A mark keeps the text around it from
    /// becoming a control token, and is removed.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(crate) fn encode_marked_prompt(&self, text: &str, mark: char) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode_pieces(text, true, Some(mark))?;
        Ok(self.with_bos(ids))
    }

    /// Inserts `mark` after the first character of everything that would become a control token, and of a prefix of one at the
    /// end of the text, which following text might complete. `None`: nothing to mark.
    pub(crate) fn mark_control(&self, text: &str, mark: char) -> Option<String> {
        let mut marked = String::new();
        let mut copied = 0;
        for (at, first) in text.char_indices() {
            let Some(specials) = self.specials.by_first_byte.get(&text.as_bytes()[at]) else { continue };
            let rest = &text[at..];
            if specials.iter().any(|s| s.control && (rest.starts_with(&s.text) || s.text.starts_with(rest))) {
                let end = at + first.len_utf8();
                marked.push_str(&text[copied..end]);
                marked.push(mark);
                copied = end;
            }
        }
        if copied == 0 {
            return None;
        }
        marked.push_str(&text[copied..]);
        Some(marked)
    }

    fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if self.add_bos
            && let Some(bos) = self.bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        ids
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        match &self.words {
            Words::BytePair(words) => words.encode(text, ids),
            Words::SentencePiece(words) => words.encode(text, ids),
        }
    }

    /// Decodes tokens: control tokens give no text, invalid UTF-8 gives U+FFFD, unknown ids are skipped.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for &id in ids {
            bytes.extend(self.text_bytes(id));
        }
        let text = String::from_utf8_lossy(&bytes);
        // Remove the space that encoding prepends.
        let prefixed = matches!(&self.words, Words::SentencePiece(words) if words.space_prefix());
        if prefixed { text.strip_prefix(' ').unwrap_or(&text).to_owned() } else { text.into_owned() }
    }

    /// A streaming decoder, which takes one token at a time.
    #[must_use]
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self)
    }

    /// The bytes of a token, with control tokens as spelled; `None` for an id outside the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.bytes.get(id as usize).map(|b| &**b)
    }

    /// The bytes that a token adds to decoded text: none for control tokens and ids outside the vocabulary.
    #[must_use]
    pub fn text_bytes(&self, id: u32) -> &[u8] {
        if self.is_control(id) { &[] } else { self.token_bytes(id).unwrap_or_default() }
    }

    /// Whether a token is a control token.
    #[must_use]
    pub fn is_control(&self, id: u32) -> bool {
        self.vocabulary.kinds.get(id as usize) == Some(&Kind::Control)
    }

    /// The id of the token with this spelling in the file.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.texts.iter().position(|t| t == text).map(|i| i as u32)
    }

    /// The beginning-of-text token.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether a prompt must begin with [`Self::bos`].
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The token that a whole text must end with, for a model that expects one.
    #[must_use]
    pub fn added_eos(&self) -> Option<u32> {
        self.eos.first().copied().filter(|_| self.add_eos)
    }

    /// End-of-generation tokens; the model's own first.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Size of the vocabulary.
    #[must_use]
    pub fn len(&self) -> usize {
        self.vocabulary.texts.len()
    }

    /// Always false, as a vocabulary has at least one token; required by a lint.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vocabulary.texts.is_empty()
    }

    /// The implementation that encodes: `wordchipper` or `tokenizers`.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        match &self.words {
            Words::BytePair(words) => words.engine(),
            Words::SentencePiece(_) => "tokenizers",
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.len()).field("engine", &self.engine()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    fn read(metadata: &Metadata) -> Result<Self, TokenizerError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const KINDS: &str = "tokenizer.ggml.token_type";
        let tokens = metadata.texts(TOKENS)?.ok_or_else(|| missing(TOKENS))?;
        let mut texts = Vec::new();
        for token in tokens {
            if texts.len() == TOKENS_MAX || token.len() > TOKEN_BYTES_MAX {
                return Err(TokenizerError::Malformed(format!(
                    "{TOKENS}: expected at most {TOKENS_MAX} tokens of at most {TOKEN_BYTES_MAX} bytes, found token {} \
                     of {} bytes",
                    texts.len(),
                    token.len()
                )));
            }
            texts.push(String::from_utf8_lossy(token).into_owned());
        }
        if texts.is_empty() {
            return Err(TokenizerError::Malformed(format!("{TOKENS} is empty")));
        }
        let kinds: Vec<Kind> = match metadata.numbers(KINDS)? {
            None => vec![Kind::Normal; texts.len()],
            Some(numbers) => numbers.into_iter().map(kind).collect::<Result<_, _>>()?,
        };
        if kinds.len() != texts.len() {
            return Err(TokenizerError::Malformed(format!("{} tokens but {} kinds", texts.len(), kinds.len())));
        }
        Ok(Self { texts, kinds, bytes: Vec::new() })
    }

    /// Ids of the control or user-defined tokens with these texts.
    fn control_tokens<'a>(&'a self, texts: &'a [&str]) -> impl Iterator<Item = u32> + 'a {
        let special = |i: usize| matches!(self.kinds[i], Kind::Control | Kind::UserDefined);
        (0..self.texts.len()).filter(move |&i| special(i) && texts.contains(&&*self.texts[i])).map(|i| i as u32)
    }
}

fn kind(number: f64) -> Result<Kind, TokenizerError> {
    match number as i64 {
        // Some converters leave the type of padding tokens undefined.
        0 | 5 => Ok(Kind::Unused),
        1 => Ok(Kind::Normal),
        2 => Ok(Kind::Unknown),
        3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        6 => Ok(Kind::Byte),
        other => Err(TokenizerError::Malformed(format!("a token of kind {other}, expected 0 to 6"))),
    }
}

/// Tokens that are matched as a whole before plain text is encoded.
struct Specials {
    /// By first byte, longest first.
    by_first_byte: BTreeMap<u8, Vec<Special>>,
}

struct Special {
    text: String,
    id: u32,
    /// Matched only when control tokens are parsed.
    control: bool,
}

impl Specials {
    fn new(vocabulary: &Vocabulary) -> Self {
        let mut by_first_byte: BTreeMap<u8, Vec<Special>> = BTreeMap::new();
        for (i, (text, kind)) in vocabulary.texts.iter().zip(&vocabulary.kinds).enumerate() {
            let control = *kind == Kind::Control;
            let Some(&first) = text.as_bytes().first().filter(|_| control || *kind == Kind::UserDefined) else {
                continue;
            };
            by_first_byte.entry(first).or_default().push(Special { text: text.clone(), id: i as u32, control });
        }
        for specials in by_first_byte.values_mut() {
            // A stable sort: if two tokens have the same text, the lower id wins.
            specials.sort_by_key(|s| std::cmp::Reverse(s.text.len()));
        }
        Self { by_first_byte }
    }

    /// The first special token in the text, the longest if several start there: (position, id, bytes).
    fn find(&self, text: &str, parse_control: bool) -> Option<(usize, u32, usize)> {
        text.bytes().enumerate().find_map(|(at, byte)| {
            // A token's text starts with a character, so no match begins inside one.
            let candidates = self.by_first_byte.get(&byte)?;
            let found = candidates
                .iter()
                .find(|s| (parse_control || !s.control) && text.as_bytes()[at..].starts_with(s.text.as_bytes()))?;
            Some((at, found.id, found.text.len()))
        })
    }
}

fn missing(key: &str) -> TokenizerError {
    TokenizerError::Malformed(format!("metadata key {key:?} is missing"))
}

/// Why a tokenizer could not be built or a text not encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Missing or contradictory metadata.
    #[error("malformed tokenizer: {0}")]
    Malformed(String),
    /// A model folder without the vocabulary file.
    #[error("{folder} has no tokenizer.json: weights alone cannot read or write text; fetch the model's whole folder", folder = .folder.display())]
    NoFile {
        /// The folder.
        folder: std::path::PathBuf,
    },
    /// A valid tokenizer of an unsupported kind.
    #[error("unsupported tokenizer: {0}")]
    Unsupported(String),
    /// The text exceeds [`TEXT_BYTES_MAX`].
    #[error("the text has {bytes} bytes, expected at most {TEXT_BYTES_MAX}; shorten it")]
    TooLong {
        /// Length of the text.
        bytes: usize,
    },
    /// The vocabulary's rules could not encode a text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}

impl From<WeightsError> for TokenizerError {
    fn from(error: WeightsError) -> Self {
        Self::Malformed(error.to_string())
    }
}

#[cfg(test)]
mod tests;
