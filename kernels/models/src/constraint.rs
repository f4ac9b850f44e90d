//! Constrains an answer to a grammar: which tokens may follow. llguidance compiles the grammar and keeps its state.
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use crate::tokenizer::Tokenizer;

/// Maximum bytes of a grammar: the largest schemas of common APIs take some tens of kilobytes.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// Maximum symbols of a compiled grammar, some megabytes of memory.
const GRAMMAR_SYMBOLS_MAX: usize = 200_000;
/// Work to build the lexer, about 10 ms at llguidance's 50,000 units per millisecond.
const LEXER_FUEL: u64 = 500_000;
/// States of the lexer, each of one or two kilobytes.
const LEXER_STATES_MAX: usize = 50_000;
/// Characters of an error message of llguidance, which may quote the whole grammar.
const ERROR_CHARS_MAX: usize = 400;

/// A model's vocabulary, prepared for constraints. Building it takes about 100 ms for 150,000 tokens.
pub struct GrammarVocabulary {
    factory: ParserFactory,
    trie: TokEnv,
}

impl GrammarVocabulary {
    /// Prepares the vocabulary of a tokenizer. Control tokens match their name in angle brackets only, never their spelling.
    ///
    /// # Errors
    /// [`ConstraintError::Vocabulary`]: the model has no end-of-text token.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, ConstraintError> {
        let none = || ConstraintError::Vocabulary("the model has no end-of-text token".to_owned());
        let &tok_eos = tokenizer.eos().first().ok_or_else(none)?;
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            match tokenizer.is_control(id) {
                true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                false => bytes.to_vec(),
            }
        };
        let vocab_size = u32::try_from(tokenizer.len()).unwrap_or(u32::MAX);
        let words: Vec<Vec<u8>> = (0..vocab_size).map(word).collect();
        let info =
            TokRxInfo { vocab_size, tok_eos, tok_bos: None, tok_pad: None, tok_unk: None, tok_end_of_turn: None };
        let trie = TokTrie::from(&info, &words).with_eos_tokens(tokenizer.eos());
        let trie: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&trie, InferenceCapabilities::default(), &slices)
            .map_err(|e| ConstraintError::Vocabulary(shortened(&e)))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: LEXER_FUEL,
            max_lexer_states: LEXER_STATES_MAX,
            max_grammar_size: GRAMMAR_SYMBOLS_MAX,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, trie })
    }
}

impl std::fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarVocabulary").field("tokens", &self.trie.tok_trie().vocab_size()).finish()
    }
}

/// The state of one answer within its grammar: a function of the grammar and of the tokens so far.
pub struct Constraint {
    /// The state before the first token.
    start: Matcher,
    now: Matcher,
    tokens: Vec<u32>,
    trie: TokEnv,
}

impl Constraint {
    /// Compiles a grammar in llguidance's dialect of Lark, which may contain JSON schemas (`%json { … }`).
    ///
    /// # Errors
    /// [`ConstraintError::TooLong`], or [`ConstraintError::Grammar`] with the place.
    pub fn new(vocabulary: &GrammarVocabulary, grammar: &str) -> Result<Self, ConstraintError> {
        if grammar.len() > GRAMMAR_BYTES_MAX {
            return Err(ConstraintError::TooLong { bytes: grammar.len() });
        }
        let parser = vocabulary.factory.create_parser(TopLevelGrammar::from_lark(grammar.to_owned()));
        let parser = parser.map_err(|e| ConstraintError::Grammar(shortened(&e)))?;
        let start = Matcher::new(Ok(parser));
        if let Some(error) = start.get_error() {
            return Err(ConstraintError::Grammar(error));
        }
        Ok(Self { now: start.clone(), start, tokens: Vec::new(), trie: vocabulary.trie.clone() })
    }

    /// Moves to the state after `answer`. Tokens that extend the previous answer are added; another answer, as after a replay,
    /// starts from the beginning.
    ///
    /// # Errors
    /// [`ConstraintError::Rejected`]: the grammar does not allow the answer.
    pub fn follow(&mut self, answer: &[u32]) -> Result<(), ConstraintError> {
        if !answer.starts_with(&self.tokens) {
            self.now = self.start.clone();
            self.tokens.clear();
        }
        for (at, &token) in answer.iter().enumerate().skip(self.tokens.len()) {
            // A matcher that has stopped takes no token, not even the end of the text.
            let ends =
                self.now.is_stopped() && !self.now.is_error() && self.trie.tok_trie().eos_tokens().contains(&token);
            if !ends {
                self.now.consume_token(token).map_err(|_| ConstraintError::Rejected { at, token })?;
            }
            self.tokens.push(token);
        }
        Ok(())
    }

    /// The tokens that may follow: bit `id % 32` of word `id / 32`. Where the grammar allows nothing more, or became too
    /// complex, only the end-of-text tokens: the set is never empty.
    pub fn allowed(&mut self) -> Vec<u32> {
        match self.now.compute_mask_or_eos() {
            Ok(mask) if !mask.is_zero() => mask.as_slice().to_vec(),
            Ok(_) | Err(_) => self.trie.tok_trie().eos_token_set().as_slice().to_vec(),
        }
    }

    /// Whether the answer so far is complete: it may end here.
    pub fn is_complete(&mut self) -> bool {
        self.now.is_accepting().unwrap_or(false) || self.now.is_stopped() && !self.now.is_error()
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

fn shortened(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    match text.char_indices().nth(ERROR_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Why a constraint could not be made or was broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The vocabulary is unfit for constraints.
    #[error("answers of this model cannot be constrained: {0}")]
    Vocabulary(String),
    /// The grammar exceeds [`GRAMMAR_BYTES_MAX`].
    #[error("the grammar has {bytes} bytes, expected at most {GRAMMAR_BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The grammar is invalid, or too complex.
    #[error("{0}")]
    Grammar(String),
    /// A token that the grammar does not allow.
    #[error("token {token}, number {at} of the answer, is not allowed by the grammar")]
    Rejected {
        /// Index in the answer.
        at: usize,
        /// The token.
        token: u32,
    },
}

#[cfg(test)]
mod tests;
