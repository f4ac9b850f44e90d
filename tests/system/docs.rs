//! The examples of the documentation, as tests: each fenced block of a page is run, or a marker gives the reason why not.
//!
//! The blocks of a page are one session, from top to bottom. `sh` and `text` are commands, in `text` with a prompt if
//! there are several machines (`first$ …`); `toml` is a job that `meshnode plan` accepts; `json` is parsed; `python` is
//! run. A marker is a comment in the line above a block, `<!-- test: … -->`, which readers do not see. It contains one
//! or several of these, separated by `; `:
//!
//! | marker | meaning |
//! |---|---|
//! | `with a node` | from here on a node runs on the first machine |
//! | `makes PATH` | the commands of the block write this file |
//! | `answer of GET PATH`, `answer of POST PATH BODY` | that node's answer has these keys, types and texts |
//! | `output of COMMAND` | an earlier command of the page has printed these lines, apart from numbers and paths |
//! | `file PATH` | the block shows this file of the repository, apart from comments |
//! | `configuration` | a configuration file, not a job |
//! | `skip, REASON` | not run; the program still has to know the arguments of the commands |
mod session;

use crate::harness::{Turn, model, require};
use serde_json::Value;
use session::{FIRST, Outcome, Session};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use system_tests::repository;

/// At most one of this number of blocks is skipped.
const BLOCKS_PER_SKIP: usize = 5;
/// Fewer blocks mean that the test does not find them.
const BLOCKS_MIN: usize = 30;
/// Prefixes of units, as words.
const SI_PREFIXES: [&str; 4] = ["k", "M", "G", "T"];
/// The folder of the example jobs, which has a page of its own.
const EXAMPLES: &str = "node/examples";
/// The line before and, without a language, after a block.
const FENCE: &str = "```";

#[test]
fn every_example_of_the_documentation_works() {
    let Some(model) = require(model()) else { return };
    let _turn = Turn::take();
    let (mut ran, mut skipped, mut wrong) = (0, 0, Vec::new());
    for page in pages() {
        let start = Instant::now();
        // Readers run commands in the root of the repository, those of the example jobs beside the jobs.
        let folder = if page.starts_with(EXAMPLES) { EXAMPLES } else { "" };
        let mut session = Session::new(Path::new(folder), &model).expect("a folder for the session");
        let text = text_of(&page);
        for block in blocks(&text).unwrap_or_else(|error| panic!("{page}:{error}")) {
            let place = format!("{page}:{}", block.line);
            match block.check(&mut session) {
                Ok(Verdict::Ran) => ran += 1,
                Ok(Verdict::Skipped(why)) => {
                    eprintln!("{place}: skipped: {why}");
                    skipped += 1;
                }
                Ok(Verdict::Lacks(tool)) => eprintln!("SKIPPED: {place}: no {tool} on this machine"),
                Err(why) => {
                    wrong.push(format!("{place}: {why}"));
                    // The next blocks of the page may depend on this one.
                    break;
                }
            }
        }
        eprintln!("{page}: {:.1} s", start.elapsed().as_secs_f64());
    }
    eprintln!("{ran} blocks ran, {skipped} were skipped");
    assert!(wrong.is_empty(), "{} examples of the documentation are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(ran + skipped >= BLOCKS_MIN, "only {ran} blocks ran, and {skipped} were skipped");
    assert!(skipped * BLOCKS_PER_SKIP <= ran + skipped, "only {ran} blocks ran, and {skipped} were skipped");
}

/// `meshnode plan` accepts each example job, and the page of the examples names each file.
#[test]
fn every_example_job_is_accepted_and_listed() {
    let Some(model) = require(model()) else { return };
    let _turn = Turn::take();
    let mut session = Session::new(Path::new(EXAMPLES), &model).expect("a folder for the session");
    session.need_node().expect("a node");
    let page = text_of(&format!("{EXAMPLES}/README.md"));
    let names = names_in(EXAMPLES);
    assert!(names.iter().filter(|name| name.ends_with(".toml")).count() >= 10, "{names:?}");
    for name in names.iter().filter(|name| *name != "README.md") {
        assert!(page.contains(&format!("`{name}`")), "the page of the examples does not name {name}");
        if name.ends_with(".toml") {
            session.run(FIRST, &format!("meshnode plan {name}")).expect("a job that the planner accepts");
        }
    }
}

#[test]
fn a_page_has_blocks_with_markers() {
    let page = "a\n```sh\nmeshnode up\n```\n<!-- test: with a node; skip, slow -->\n```text\nx\n\ny\n```\nb\n";
    let found = blocks(page).expect("a page");
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].line, found[0].language, found[0].lines.as_slice()), (2, "sh", &["meshnode up"][..]));
    assert!(!found[0].with_node && found[0].way.is_none());
    assert_eq!((found[1].line, found[1].language, found[1].text().as_str()), (6, "text", "x\n\ny\n"));
    assert!(found[1].with_node && matches!(found[1].way, Some(Way::Skip("slow"))));
    for wrong in [
        "<!-- test: with a node -->\n\n```sh\n```\n",
        "<!-- test: skipped -->\n```sh\n```\n",
        "- an item\n  ```sh\n  ```\n",
        "```sh\nmeshnode up\n",
    ] {
        assert!(blocks(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn commands_have_prompts_and_comments() {
    assert_eq!(command_in("other$  meshnode join mesh1…   # elsewhere"), ("other", "meshnode join mesh1…"));
    assert_eq!(command_in("meshnode run m --prompt 'a # b'"), (FIRST, "meshnode run m --prompt 'a # b'"));
    assert_eq!(command_in("curl -H \"a $(cat key)\""), (FIRST, "curl -H \"a $(cat key)\""));
}

#[test]
fn answers_may_have_more_than_is_documented() {
    let check = |documented: &str, actual: &str| {
        let parsed = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        has_shape(&parsed(documented), &parsed(actual), "answer").is_ok()
    };
    assert!(check(r#"{"a": [{"b": 1, "c": "x"}]}"#, r#"{"a": [{"c": "x", "b": 2}, {}], "d": null}"#));
    assert!(!check(r#"{"a": [{"b": 1}]}"#, r#"{"a": []}"#));
    assert!(!check(r#"{"a": {"b": 1}}"#, r#"{"a": {"c": 1}}"#));
    assert!(!check(r#"{"a": 1}"#, r#"{"a": "1"}"#));
    assert!(!check(r#"{"a": "x"}"#, r#"{"a": "y"}"#));
    assert_eq!(without_numbers("  in /tmp/a 0.25 s"), without_numbers("in /home/b 3 s"));
    assert_eq!(without_numbers("9.5 M cells/s, 1 step"), without_numbers("1.2 G cells/s, 3 step"));
    assert_ne!(without_numbers("state hash 1"), without_numbers("state 1 hash"));
}

/// A fenced block of a page.
struct Block<'a> {
    /// Number of its first line in the page.
    line: usize,
    /// What follows the fence.
    language: &'a str,
    lines: Vec<&'a str>,
    with_node: bool,
    /// A file that its commands write.
    makes: Option<&'a str>,
    /// How to check it, if the language alone does not say it.
    way: Option<Way<'a>>,
}

enum Way<'a> {
    Answer(&'a str),
    Output(&'a str),
    File(&'a str),
    Configuration,
    Skip(&'a str),
}

enum Verdict {
    Ran,
    /// With the reason.
    Skipped(String),
    /// This machine lacks a tool.
    Lacks(&'static str),
}

/// The blocks of a page, or the number of a line and what is wrong there.
fn blocks(page: &str) -> Outcome<Vec<Block<'_>>> {
    let (mut found, mut markers) = (Vec::new(), None);
    let mut lines = (1..).zip(page.lines());
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.strip_prefix(FENCE) else {
            if line.trim_start().starts_with(FENCE) {
                return Err(format!("{number}: the block is indented").into());
            }
            if markers.is_some() {
                return Err(format!("{number}: expected the block of the marker above").into());
            }
            markers = line.strip_prefix("<!-- test: ").and_then(|rest| rest.strip_suffix(" -->"));
            continue;
        };
        let mut block = Block { line: number, language, lines: Vec::new(), with_node: false, makes: None, way: None };
        for marker in markers.take().into_iter().flat_map(|markers| markers.split("; ")) {
            block.mark(marker).map_err(|why| format!("{number}: {why}"))?;
        }
        loop {
            match lines.next() {
                Some((_, FENCE)) => break,
                Some((_, line)) => block.lines.push(line),
                None => return Err(format!("{number}: the block has no end").into()),
            }
        }
        found.push(block);
    }
    Ok(found)
}

impl<'a> Block<'a> {
    fn mark(&mut self, marker: &'a str) -> Outcome<()> {
        let rest = |start: &str| marker.strip_prefix(start).filter(|rest| !rest.is_empty());
        if marker == "with a node" {
            self.with_node = true;
        } else if let Some(path) = rest("makes ") {
            self.makes = Some(path);
        } else if marker == "configuration" {
            self.way = Some(Way::Configuration);
        } else if let Some(request) = rest("answer of ") {
            self.way = Some(Way::Answer(request));
        } else if let Some(command) = rest("output of ") {
            self.way = Some(Way::Output(command));
        } else if let Some(path) = rest("file ") {
            self.way = Some(Way::File(path));
        } else if let Some(why) = rest("skip, ") {
            self.way = Some(Way::Skip(why));
        } else {
            return Err(format!("unknown marker `{marker}`").into());
        }
        Ok(())
    }

    fn text(&self) -> String {
        self.lines.iter().flat_map(|line| [*line, "\n"]).collect()
    }

    fn check(&self, session: &mut Session) -> Outcome<Verdict> {
        if let Some(Way::Skip(why)) = &self.way {
            let commands = self.commands().filter(|_| matches!(self.language, "sh" | "text"));
            for (machine, command) in commands {
                session.check_arguments(machine, command)?;
            }
            return Ok(Verdict::Skipped((*why).to_owned()));
        }
        if self.with_node {
            session.need_node()?;
        }
        match (&self.way, self.language) {
            (Some(Way::Answer(request)), "json") => {
                has_shape(&serde_json::from_str::<Value>(&self.text())?, &session.answer(request)?, "answer")?;
            }
            (Some(Way::Output(command)), "text") => self.is_in(session.output_of(command)?)?,
            (Some(Way::File(path)), "text") => self.shows(path)?,
            (Some(Way::Configuration), "toml") => {
                session.write("configuration.toml", &self.text())?;
                meshnode::config::ConfigFile::load(Some(&session.path("configuration.toml")))?;
            }
            (None, "toml") => {
                let name = format!("block-{}.toml", self.line);
                session.write(&name, &self.text())?;
                session.run(FIRST, &format!("meshnode plan {name}"))?;
            }
            (None, "json") => {
                serde_json::from_str::<Value>(&self.text())?;
            }
            (None, "python") => return self.run_python(session),
            (None, "sh" | "text") => return self.run_commands(session),
            (_, language) => {
                return Err(format!("nothing runs a block of language `{language}` with this marker").into());
            }
        }
        Ok(Verdict::Ran)
    }

    /// Each command with its machine.
    fn commands(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.lines.iter().copied().map(command_in).filter(|(_, command)| !command.is_empty())
    }

    fn run_commands(&self, session: &mut Session) -> Outcome<Verdict> {
        if self.commands().any(|(_, command)| command.starts_with("curl ")) && !runs("curl", &["--version"]) {
            return Ok(Verdict::Lacks("curl"));
        }
        for (machine, command) in self.commands() {
            session.run(machine, command)?;
        }
        match self.makes {
            Some(path) if !session.path(path).is_file() => Err(format!("the commands do not write {path}").into()),
            _ => Ok(Verdict::Ran),
        }
    }

    fn run_python(&self, session: &mut Session) -> Outcome<Verdict> {
        let python = std::env::var("MESHNODE_PYTHON").unwrap_or_else(|_| "python3".into());
        let text = self.text();
        if !runs(&python, &["-c", "import json"]) {
            return Ok(Verdict::Lacks("Python"));
        }
        for (package, client) in [("openai", "openai client"), ("anthropic", "anthropic client")] {
            if text.contains(package) && !runs(&python, &["-c", &format!("import {package}")]) {
                let required = std::env::var("MESHNODE_REQUIRE").unwrap_or_default();
                if required.split(',').any(|name| name == package) {
                    return Err(format!("the {client} is required: pip install {package}").into());
                }
                return Ok(Verdict::Lacks(client));
            }
        }
        session.run_python(&python, &format!("block_{}.py", self.line), &text)?;
        Ok(Verdict::Ran)
    }

    /// Whether a command has printed these lines in this order.
    fn is_in(&self, output: &str) -> Outcome<()> {
        let mut printed = output.lines().map(without_numbers);
        for line in &self.lines {
            let expected = without_numbers(line);
            if !printed.any(|line| line == expected) {
                return Err(format!("`{line}` is not in the output:\n{output}").into());
            }
        }
        Ok(())
    }

    /// Whether the block has the statements of a file.
    fn shows(&self, path: &str) -> Outcome<()> {
        let file = text_of(path);
        let is_statement = |line: &&str| !line.is_empty() && !line.starts_with('#');
        let statements: Vec<&str> = file.lines().filter(is_statement).collect();
        let shown: Vec<&str> = self.lines.iter().copied().filter(is_statement).collect();
        if shown == statements { Ok(()) } else { Err(format!("{path} has other statements: {statements:?}").into()) }
    }
}

/// The machine and the command of a line: `MACHINE$  COMMAND  # comment`, or the command alone.
fn command_in(line: &str) -> (&str, &str) {
    let line = line.split_once("  #").map_or(line, |(command, _)| command).trim();
    match line.split_once("$ ") {
        Some((machine, command)) if machine.chars().all(char::is_alphanumeric) => (machine, command.trim()),
        _ => (FIRST, line),
    }
}

/// Whether an answer has the documented keys, types and texts. Of a list, the first entry is compared.
fn has_shape(documented: &Value, actual: &Value, place: &str) -> Outcome<()> {
    if let (Some(documented), Some(actual)) = (documented.as_object(), actual.as_object()) {
        for (key, value) in documented {
            let place = format!("{place}.{key}");
            has_shape(value, actual.get(key).ok_or_else(|| format!("there is no `{place}`"))?, &place)?;
        }
        return Ok(());
    }
    if let (Some(documented), Some(actual)) = (documented.as_array(), actual.as_array()) {
        let Some(value) = documented.first() else { return Ok(()) };
        let place = format!("{place}[0]");
        return has_shape(value, actual.first().ok_or_else(|| format!("there is no `{place}`"))?, &place);
    }
    let is_same_type = std::mem::discriminant(documented) == std::mem::discriminant(actual);
    if is_same_type && (!actual.is_string() || actual == documented) {
        return Ok(());
    }
    Err(format!("`{place}` is {actual}, documented as {documented}").into())
}

/// The words of a line without numbers, their SI prefixes, hashes and paths: a fast machine prints G where a slow one prints M.
fn without_numbers(line: &str) -> Vec<&str> {
    let differs = |word: &str| word.contains(|c: char| c.is_ascii_digit() || c == '/') || SI_PREFIXES.contains(&word);
    line.split_whitespace().map(|word| if differs(word) { "#" } else { word }).collect()
}

/// Whether a program is there and succeeds.
fn runs(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// The documentation: paths from the repository's root.
fn pages() -> Vec<String> {
    let docs = names_in("docs").into_iter().filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}"));
    ["README.md".to_owned()].into_iter().chain(docs).chain([format!("{EXAMPLES}/README.md")]).collect()
}

/// The names of a folder's files, sorted.
fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(repository().join(folder)).expect("a folder of the repository").flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn text_of(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
