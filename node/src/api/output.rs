//! Splits a model's answer into thoughts, text and tool calls while it arrives.
use super::tools::ToolFormat;
use serde_json::Value;

/// How to read an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Whether the model may think before it answers.
    pub(crate) thoughts: Thoughts,
    /// The form of tool calls, if the request has tools.
    pub(crate) tools: Option<ToolFormat>,
}

/// Thoughts before an answer, between `<think>` and `</think>`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Thoughts {
    /// The model does not mark any.
    #[default]
    Never,
    /// They may be at the beginning.
    Possible,
    /// The prompt has opened them.
    Opened,
}

/// A part of an answer. Parts are in the order in which the model wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Text of the thoughts.
    Thoughts(String),
    /// Text of the answer.
    Text(String),
    /// A complete call.
    Call(ToolCall),
}

/// Appends parts. Texts of one kind that follow each other are one part.
pub(crate) fn append(parts: &mut Vec<Part>, later: Vec<Part>) {
    for part in later {
        match (parts.last_mut(), part) {
            (_, Part::Thoughts(text) | Part::Text(text)) if text.is_empty() => {}
            (Some(Part::Thoughts(before)), Part::Thoughts(text)) | (Some(Part::Text(before)), Part::Text(text)) => {
                before.push_str(&text);
            }
            (_, part) => parts.push(part),
        }
    }
}

/// Parts of an answer by kind, for APIs that do not keep their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    /// Text of the answer.
    pub(crate) content: String,
    /// Text of the thoughts.
    pub(crate) reasoning: String,
    /// Complete calls.
    pub(crate) calls: Vec<ToolCall>,
}

impl From<Vec<Part>> for Delta {
    fn from(parts: Vec<Part>) -> Self {
        let mut delta = Self::default();
        for part in parts {
            match part {
                Part::Thoughts(text) => delta.reasoning.push_str(&text),
                Part::Text(text) => delta.content.push_str(&text),
                Part::Call(call) => delta.calls.push(call),
            }
        }
        delta
    }
}

/// A tool call as the model wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// Number of the call in the answer, from 0.
    pub(crate) index: usize,
    /// The tool.
    pub(crate) name: String,
    /// A JSON object, as text.
    pub(crate) arguments: String,
}

/// Reads one answer. The parts, appended to each other, do not depend on how the text is split.
#[derive(Debug)]
pub(crate) struct OutputReader {
    format: Option<ToolFormat>,
    state: State,
    /// Text whose meaning depends on what follows.
    held: String,
    calls: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space has arrived, and thoughts may follow.
    Beginning,
    Thoughts,
    /// The first text after the thoughts: white space before it is dropped.
    AnswerBegins,
    Answer,
    /// Within `<tool_call>`.
    Call,
    /// The rest of the answer is calls.
    Calls,
}

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const CALLS: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";
const PYTHON: &str = "<|python_tag|>";

/// Markers that models write as control tokens, which otherwise give no text.
pub(crate) const MARKERS: [&str; 7] = [THINK, THINK_END, CALL, CALL_END, CALLS, ARGUMENTS, PYTHON];

impl OutputReader {
    pub(crate) fn new(reading: Reading) -> Self {
        let state = match reading.thoughts {
            Thoughts::Opened => State::Thoughts,
            Thoughts::Possible => State::Beginning,
            Thoughts::Never if reading.tools.is_some() => State::AnswerBegins,
            Thoughts::Never => State::Answer,
        };
        Self { format: reading.tools, state, held: String::new(), calls: 0 }
    }

    /// Whether the model is thinking.
    pub(crate) fn is_in_thoughts(&self) -> bool {
        self.state == State::Thoughts
    }

    /// Takes more text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        self.read(false)
    }

    /// The answer has ended.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        self.read(true)
    }

    fn read(&mut self, ended: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        while let Some(more) = self.advance(ended) {
            append(&mut parts, more);
        }
        parts
    }

    /// Moves over one part of the held text; `None` if more text is needed.
    fn advance(&mut self, ended: bool) -> Option<Vec<Part>> {
        if self.held.is_empty() {
            return None;
        }
        match self.state {
            State::Beginning => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(THINK) {
                    self.held = rest.to_owned();
                    self.state = State::Thoughts;
                } else if THINK.starts_with(text) && !ended {
                    return None;
                } else {
                    self.state = if self.format.is_some() { State::AnswerBegins } else { State::Answer };
                }
                Some(Vec::new())
            }
            State::Thoughts => {
                let (reasoning, found) = self.take_until(THINK_END, ended)?;
                if found {
                    self.state = State::AnswerBegins;
                }
                Some(vec![Part::Thoughts(reasoning)])
            }
            State::AnswerBegins => self.begin_answer(ended),
            State::Answer => self.answer(ended),
            State::Call => {
                let found = self.held.find(CALL_END);
                if found.is_none() && !ended {
                    return None;
                }
                let body: String = self.held.drain(..found.unwrap_or(self.held.len())).collect();
                self.held.drain(..if found.is_some() { CALL_END.len() } else { 0 });
                self.state = State::AnswerBegins;
                let end = if found.is_some() { CALL_END } else { "" };
                Some(self.calls_of(&body).unwrap_or_else(|| text(format!("{CALL}{body}{end}"))))
            }
            State::Calls if ended => {
                let body = std::mem::take(&mut self.held);
                Some(self.calls_of(&body).unwrap_or_else(|| text(body)))
            }
            State::Calls => None,
        }
    }

    /// Drops white space; recognises an answer that is calls and nothing else.
    fn begin_answer(&mut self, ended: bool) -> Option<Vec<Part>> {
        let begin = self.held.len() - self.held.trim_start().len();
        self.held.drain(..begin);
        if self.held.is_empty() {
            return None;
        }
        if self.format == Some(ToolFormat::Llama) {
            if PYTHON.starts_with(&self.held) && !ended {
                return None;
            }
            if self.held.starts_with('{') || self.held.starts_with(PYTHON) {
                self.state = State::Calls;
                return Some(Vec::new());
            }
        }
        self.state = State::Answer;
        Some(Vec::new())
    }

    fn answer(&mut self, ended: bool) -> Option<Vec<Part>> {
        let (tag, next) = match self.format {
            Some(ToolFormat::Hermes) => (CALL, State::Call),
            Some(ToolFormat::Mistral) => (CALLS, State::Calls),
            Some(ToolFormat::Llama) | None => return Some(text(std::mem::take(&mut self.held))),
        };
        let (mut content, found) = self.take_until(tag, ended)?;
        if found {
            self.state = next;
            content.truncate(content.trim_end().len());
        } else if !ended {
            // White space before a call is not part of the text.
            let end = content.trim_end().len();
            self.held.insert_str(0, &content[end..]);
            content.truncate(end);
            if content.is_empty() {
                return None;
            }
        }
        Some(text(content))
    }

    /// Takes the text before `tag`, and the tag; without the tag, all text that does not begin it.
    fn take_until(&mut self, tag: &str, ended: bool) -> Option<(String, bool)> {
        if let Some(at) = self.held.find(tag) {
            let before = self.held.drain(..at).collect();
            self.held.drain(..tag.len());
            return Some((before, true));
        }
        let keep = if ended { 0 } else { super::pieces::overlap(&self.held, tag) };
        let taken: String = self.held.drain(..self.held.len() - keep).collect();
        (!taken.is_empty()).then_some((taken, false))
    }

    /// The calls in a text; `None` if it is not calls.
    fn calls_of(&mut self, body: &str) -> Option<Vec<Part>> {
        let body = body.trim().trim_start_matches(PYTHON).trim_start();
        let mut found = Vec::new();
        match body.split_once(ARGUMENTS) {
            // Newer Mistral models: `name[ARGS]{…}`, repeated.
            Some(_) => {
                for part in body.split(CALLS) {
                    let (name, arguments) = part.split_once(ARGUMENTS)?;
                    found.push((name.trim().to_owned(), as_text(&serde_json::from_str(arguments).ok()?)));
                }
            }
            None => {
                let mut rest = body;
                while !rest.is_empty() {
                    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
                    let value = values.next()?.ok()?;
                    let list = value.as_array().cloned().unwrap_or_else(|| vec![value]);
                    for call in list {
                        let arguments = call.get("arguments").or_else(|| call.get("parameters"));
                        let none = Value::Object(serde_json::Map::new());
                        found.push((call["name"].as_str()?.to_owned(), as_text(arguments.unwrap_or(&none))));
                    }
                    rest = rest[values.byte_offset()..].trim_start_matches([';', ' ', '\n', '\t', '\r']);
                }
            }
        }
        if found.is_empty() || found.iter().any(|(name, _)| name.is_empty()) {
            return None;
        }
        let first = self.calls;
        self.calls += found.len();
        let call = |(at, (name, arguments))| Part::Call(ToolCall { index: first + at, name, arguments });
        Some(found.into_iter().enumerate().map(call).collect())
    }
}

/// Arguments as text. Some models write the object as a string.
fn as_text(arguments: &Value) -> String {
    arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned)
}

fn text(content: String) -> Vec<Part> {
    vec![Part::Text(content)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(reading: Reading, pieces: &[&str]) -> Vec<Part> {
        let mut reader = OutputReader::new(reading);
        let mut all = Vec::new();
        pieces.iter().for_each(|piece| append(&mut all, reader.push(piece)));
        append(&mut all, reader.finish());
        all
    }

    fn read(reading: Reading, pieces: &[&str]) -> Delta {
        parts(reading, pieces).into()
    }

    fn calls(delta: &Delta) -> Vec<(usize, &str, &str)> {
        delta.calls.iter().map(|call| (call.index, call.name.as_str(), call.arguments.as_str())).collect()
    }

    fn with(format: ToolFormat) -> Reading {
        Reading { thoughts: Thoughts::Possible, tools: Some(format) }
    }

    #[test]
    fn hermes_calls_are_separated_from_the_text() {
        let answer = "\n<think>\nhm\n</think>\n\nLet me look. \n<tool_call>\n{\"name\": \"a\", \"arguments\": {\"z\": 1, \"b\": [2]}}\n</tool_call>\
                      \n<tool_call>{\"name\": \"b\"}</tool_call>\n";
        let read = read(with(ToolFormat::Hermes), &[answer]);
        assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("\nhm\n", "Let me look."));
        assert_eq!(calls(&read), [(0, "a", "{\"z\":1,\"b\":[2]}"), (1, "b", "{}")]);
    }

    #[test]
    fn parts_keep_their_order() {
        let answer =
            "<think>hm</think>a <tool_call>{\"name\": \"f\"}</tool_call> b <tool_call>{\"name\": \"g\"}</tool_call>";
        let call = |index, name: &str| Part::Call(ToolCall { index, name: name.into(), arguments: "{}".into() });
        let [a, b] = ["a", "b"].map(|text| Part::Text(text.into()));
        let expected = [Part::Thoughts("hm".into()), a, call(0, "f"), b, call(1, "g")];
        assert_eq!(parts(with(ToolFormat::Hermes), &[answer]), expected);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        let hermes = |answer| read(with(ToolFormat::Hermes), &[answer]).content;
        assert_eq!(hermes("a <tool_call>{\"name\": }</tool_call> b"), "a<tool_call>{\"name\": }</tool_call>b");
        assert_eq!(hermes("<tool_call>[]</tool_call>"), "<tool_call>[]</tool_call>");
        assert_eq!(hermes("a <tool_ca"), "a <tool_ca");
        assert_eq!(hermes("a <tool_call>{\"na"), "a<tool_call>{\"na");
        assert_eq!(hermes("1 < 2 \n"), "1 < 2 \n");
        let llama = read(with(ToolFormat::Llama), &["{\"x\": 1}"]);
        assert_eq!((llama.content.as_str(), llama.calls.len()), ("{\"x\": 1}", 0));
        let plain = read(Reading::default(), &[" <tool_call>{\"name\": \"a\"}</tool_call> <think>x"]);
        assert_eq!(plain.content, " <tool_call>{\"name\": \"a\"}</tool_call> <think>x");
    }

    #[test]
    fn other_formats_are_read() {
        let llama = with(ToolFormat::Llama);
        let two = read(
            llama,
            &["<|python_tag|>{\"name\": \"a\", \"parameters\": {\"x\": 1}}; {\"name\": \"b\", \"parameters\": {}}"],
        );
        assert_eq!(calls(&two), [(0, "a", "{\"x\":1}"), (1, "b", "{}")]);
        assert_eq!(read(llama, &["Hi {\"name\": \"a\"}"]).content, "Hi {\"name\": \"a\"}");
        let mistral = with(ToolFormat::Mistral);
        let old = read(
            mistral,
            &["ok [TOOL_CALLS] [{\"name\": \"a\", \"arguments\": \"{\\\"x\\\": 1}\"}, {\"name\": \"b\"}]"],
        );
        assert_eq!((old.content.as_str(), calls(&old)), ("ok", vec![(0, "a", "{\"x\": 1}"), (1, "b", "{}")]));
        let new = read(mistral, &["[TOOL_CALLS]a[ARGS]{\"x\": 1}[TOOL_CALLS]b[ARGS]{}"]);
        assert_eq!(calls(&new), [(0, "a", "{\"x\":1}"), (1, "b", "{}")]);
    }

    #[test]
    fn thoughts_opened_by_the_prompt_end_with_their_tag() {
        let opened = Reading { thoughts: Thoughts::Opened, tools: None };
        let both = read(opened, &["so</think>\n\nYes."]);
        assert_eq!((both.reasoning.as_str(), both.content.as_str()), ("so", "Yes."));
        assert_eq!(read(opened, &["cut off </thi"]).reasoning, "cut off </thi");
        assert_eq!(read(Reading { thoughts: Thoughts::Possible, tools: None }, &["  <thin"]).content, "  <thin");
    }

    #[test]
    fn every_split_reads_the_same() {
        let answers = [
            "<think>a < b</think> text <tool_call>\n{\"name\": \"f\", \"arguments\": {\"é\": \"</tool\"}}\n</tool_call>\n more ",
            " [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}] ",
            "{\"name\": \"f\", \"parameters\": {}}",
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}",
            "x <think> y </think> <tool_call>{}</tool_call> z",
        ];
        for answer in answers {
            for format in [ToolFormat::Hermes, ToolFormat::Mistral, ToolFormat::Llama] {
                let whole = parts(with(format), &[answer]);
                for size in 1..=5 {
                    let chars: Vec<String> =
                        answer.chars().collect::<Vec<_>>().chunks(size).map(String::from_iter).collect();
                    let pieces: Vec<&str> = chars.iter().map(String::as_str).collect();
                    assert_eq!(parts(with(format), &pieces), whole, "{answer:?} by {size} as {format:?}");
                }
            }
        }
    }
}
