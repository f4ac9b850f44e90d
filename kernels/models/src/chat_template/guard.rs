//! Sandbox for chat templates: bounds what a template may do, because a model file is untrusted code.
//!
//! Fuel bounds the number of instructions, but a single instruction may double a string, compare lists with heavily shared
//! entries, or never end. So every instruction and every filter, test, function and method that reads or produces more than a
//! constant amount of data first spends that amount from a budget for the whole rendering. Values nest to a bounded depth, and
//! values cannot contain namespaces, so dropping them cannot overflow the stack and cycles cannot form.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, Vm, WhitespaceConfig, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, escape_formatter, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Instructions per rendering: a few hundred for each of ten thousand messages, about one second.
const FUEL: u64 = 10_000_000;
/// Bytes that a rendering may read and produce: four times the longest prompt.
const WORK_MAX: usize = 4 * super::RENDERED_BYTES_MAX;
/// Cost of an entry of a list or map, in addition to its text.
const ENTRY_BYTES: usize = 32;
/// Maximum nesting of lists; published templates and JSON schemas of tools need about ten levels.
const DEPTH_MAX: usize = 32;
/// Maximum bytes of a template; the longest published ones have about 30 KiB.
const SOURCE_BYTES_MAX: usize = 64 << 10;
/// Stack size. The parser and the code generator recurse once per operator of `1+1+1+…`, with less than 4 KiB per level.
const STACK_BYTES: usize = 128 << 20;
/// Maximum indentation before an entry of indented JSON: 16 spaces for each of [`DEPTH_MAX`] levels.
const INDENT_BYTES_MAX: usize = 16 * DEPTH_MAX;

/// Runs a template; without a context, only checks that it parses.
///
/// # Errors
/// The template is longer than [`SOURCE_BYTES_MAX`], is not valid Jinja, rejected its context, or exceeded a bound.
pub(super) fn run(source: &str, context: Option<Value>) -> Result<String, Error> {
    if source.len() > SOURCE_BYTES_MAX {
        let what = format!("expected at most {SOURCE_BYTES_MAX} bytes, found {} bytes", source.len());
        return Err(Error::new(ErrorKind::SyntaxError, what));
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK_BYTES);
        let running =
            thread.spawn_scoped(scope, || compile_and_run(source, context)).map_err(|e| wrong(e.to_string()))?;
        running.join().unwrap_or_else(|_| Err(wrong("the template engine failed".into())))
    })
}

fn compile_and_run(source: &str, context: Option<Value>) -> Result<String, Error> {
    const NAME: &str = "chat";
    let environment = environment();
    let whitespace = WhitespaceConfig { trim_blocks: true, lstrip_blocks: true, ..WhitespaceConfig::default() };
    check_constants(source, whitespace)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&parse(source, NAME, SyntaxConfig, whitespace)?);
    let (instructions, blocks) = generator.finish();
    let instructions = with_guards(&instructions)?;
    let blocks: BTreeMap<&str, Instructions<'_>> =
        blocks.iter().map(|(name, block)| Ok((*name, with_guards(block)?))).collect::<Result<_, Error>>()?;
    let Some(context) = context else { return Ok(String::new()) };
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    Vm::new(&environment).eval(&instructions, context, &blocks, &mut output, AutoEscape::None)?;
    Ok(text)
}

/// Rejects repetition of constants: the code generator folds it at compile time, where no guard applies.
fn check_constants(source: &str, whitespace: WhitespaceConfig) -> Result<(), Error> {
    let is_word = |name: &str| matches!(name, "and" | "or" | "not" | "in" | "true" | "True" | "false" | "False");
    let is_variable = |token: Option<&Token<'_>>| matches!(token, Some(Token::Ident(name)) if !is_word(name));
    let mut block = Vec::new();
    for token in tokenize(source, false, SyntaxConfig, whitespace) {
        let (token, _) = token?;
        if !matches!(token, Token::VariableEnd | Token::BlockEnd) {
            block.push(token);
            continue;
        }
        let of_numbers = block.iter().all(|token| {
            !matches!(
                token,
                Token::Str(_) | Token::String(_) | Token::BracketOpen | Token::BraceOpen | Token::ParenOpen
            )
        });
        for (index, token) in block.iter().enumerate() {
            let beside = [index.checked_sub(1).and_then(|before| block.get(before)), block.get(index + 1)];
            if matches!(token, Token::Mul) && !of_numbers && !beside.into_iter().any(is_variable) {
                return Err(Error::new(
                    ErrorKind::SyntaxError,
                    "`*` needs a variable beside it: constants cannot be repeated",
                ));
            }
        }
        block.clear();
    }
    Ok(())
}

fn wrong(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Bytes that a rendering has read and produced so far.
#[derive(Debug, Default)]
struct Work(AtomicUsize);

impl Object for Work {}

fn spend(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    let work: Arc<Work> = state.get_or_set_temp_object("meshnode work", Work::default);
    // The first failure ends the rendering, so the sum cannot overflow.
    let bytes = bytes.min(WORK_MAX + 1);
    if work.0.fetch_add(bytes, Ordering::Relaxed) + bytes > WORK_MAX {
        return Err(wrong(format!("it reads and produces more than {WORK_MAX} bytes of text")));
    }
    Ok(())
}

/// Cost of a value: its text or entries, and recursively theirs if `deep`. Stops early once the cost exceeds [`WORK_MAX`].
fn size(value: &Value, deep: bool, depth: usize) -> Result<usize, Error> {
    let kind = value.kind();
    if let Some(text) = value.as_str() {
        return Ok(text.len());
    }
    if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(value.as_bytes().map_or(0, <[u8]>::len));
    }
    if !deep && let Some(count) = value.len() {
        return Ok(count.saturating_mul(ENTRY_BYTES));
    }
    if depth == DEPTH_MAX {
        return Err(wrong(format!("lists are nested more than {DEPTH_MAX} levels deep")));
    }
    let mut sum: usize = 0;
    for entry in value.try_iter()? {
        sum = sum.saturating_add(ENTRY_BYTES);
        if deep {
            sum = sum.saturating_add(size(&entry, true, depth + 1)?);
            if kind == ValueKind::Map {
                sum = sum.saturating_add(size(&value.get_item(&entry)?, true, depth + 1)?);
            }
        }
        if sum > WORK_MAX {
            break;
        }
    }
    Ok(sum)
}

fn spend_on<'a>(state: &State<'_, '_>, values: impl IntoIterator<Item = &'a Value>, deep: bool) -> Result<(), Error> {
    values.into_iter().try_for_each(|value| spend(state, size(value, deep, 0)?))
}

/// Charges for a result. Converts an iterator to a list, because iterating it again would repeat its work.
fn settled(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Iterable {
        let mut entries = Vec::new();
        for entry in value.try_iter()? {
            spend(state, ENTRY_BYTES)?;
            entries.push(entry);
        }
        return Ok(Value::from(entries));
    }
    if value.as_str().is_some() {
        spend_on(state, [&value], false)?;
    }
    Ok(value)
}

/// Rejects namespaces, macros and loops as parts of other values, where they could form a cycle. They look like maps, but their
/// types belong to the engine.
fn check_data(value: &Value) -> Result<(), Error> {
    let of_engine = value.as_object().is_some_and(|object| object.type_name().starts_with("minijinja::"));
    if of_engine && value.kind() == ValueKind::Map || value.kind() == ValueKind::Plain {
        return Err(wrong("namespaces, macros and functions cannot be stored in other values".into()));
    }
    Ok(())
}

/// Inserts guards before or after the instructions that need them.
fn with_guards<'s>(plain: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let mut expanded = Vec::with_capacity(plain.len());
    // New index of each instruction, and of the end.
    let mut places = Vec::with_capacity(plain.len() + 1);
    for index in 0..plain.len() as u32 {
        places.push(expanded.len() as u32);
        if let Some(instruction) = plain.get(index) {
            let line = plain.get_line(index).unwrap_or(0) as u16;
            expanded.extend(expand(instruction.clone())?.into_iter().map(|instruction| (instruction, line)));
        }
    }
    places.push(expanded.len() as u32);
    let mut guarded = Instructions::new(plain.name(), plain.source());
    for (mut instruction, line) in expanded {
        if let Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) = &mut instruction
        {
            *target = *places.get(*target as usize).ok_or_else(|| wrong("a jump leaves the template".into()))?;
        }
        guarded.add_with_line(instruction, line);
    }
    Ok(guarded)
}

/// A guard is a filter with a name that no template can spell. A guard with several operands returns them as a list, which
/// `UnpackList` pushes back with its first entry on top.
#[allow(clippy::wildcard_enum_match_arm, reason = "the engine's instructions are many, and most need no guard")]
fn expand(instruction: Instruction<'_>) -> Result<Vec<Instruction<'_>>, Error> {
    let guard = |name, operands| Instruction::ApplyFilter(name, Some(operands), !0);
    let before = |name, operands: u16, instruction| {
        vec![guard(name, operands), Instruction::UnpackList(operands.into()), instruction]
    };
    let count = |count: usize| u16::try_from(count).map_err(|_| wrong("a call has too many arguments".into()));
    Ok(match instruction {
        // Emitted as a value, it goes through the formatter, which charges for it.
        Instruction::EmitRaw(raw) => {
            vec![Instruction::LoadConst(Value::from_safe_string(raw.to_owned())), Instruction::Emit]
        }
        Instruction::GetItem => vec![guard(ITEM, 2)],
        Instruction::Slice => [before(SHALLOW, 4, instruction), vec![guard(SETTLED, 1)]].concat(),
        Instruction::Add => [before(SHALLOW, 2, instruction), vec![guard(SETTLED, 1)]].concat(),
        Instruction::Mul => [before(TIMES, 2, instruction), vec![guard(SETTLED, 1)]].concat(),
        Instruction::StringConcat
        | Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_) => before(DEEP, 2, instruction),
        Instruction::BuildList(_) | Instruction::BuildMap(_) => vec![instruction, guard(BUILT, 1)],
        Instruction::SetAttr(_) => before(ASSIGNED, 2, instruction),
        Instruction::UnpackLists(lists) => before(SHALLOW, count(lists)?, instruction),
        Instruction::MergeKwargs(maps) => before(SHALLOW, count(maps)?, instruction),
        Instruction::PushLoop(_) => vec![guard(LOOPED, 1), instruction],
        Instruction::CallMethod("changed", _) => return Err(wrong("loop.changed is not supported".into())),
        other => vec![other],
    })
}

const SHALLOW: &str = ":shallow";
const DEEP: &str = ":deep";
const TIMES: &str = ":times";
const ITEM: &str = ":item";
const SETTLED: &str = ":settled";
const BUILT: &str = ":built";
const ASSIGNED: &str = ":assigned";
const LOOPED: &str = ":looped";

fn add_guards(environment: &mut Environment<'_>) {
    let back = |operands: Rest<Value>| Value::from(operands.0.into_iter().rev().collect::<Vec<_>>());
    environment.add_filter(SHALLOW, move |state: &State<'_, '_>, operands: Rest<Value>| {
        spend_on(state, operands.iter(), false)?;
        Ok::<_, Error>(back(operands))
    });
    environment.add_filter(DEEP, move |state: &State<'_, '_>, operands: Rest<Value>| {
        spend_on(state, operands.iter(), true)?;
        Ok::<_, Error>(back(operands))
    });
    environment.add_filter(TIMES, move |state: &State<'_, '_>, operands: Rest<Value>| {
        let times = numbers(&operands).max(1);
        for operand in operands.iter() {
            spend(state, size(operand, false, 0)?.saturating_mul(times))?;
        }
        Ok::<_, Error>(back(operands))
    });
    environment.add_filter(ITEM, |state: &State<'_, '_>, container: &Value, key: &Value| {
        spend_on(state, [container, key].into_iter().filter(|value| value.as_str().is_some()), false)?;
        if container.kind() == ValueKind::Iterable {
            spend_on(state, [container], false)?;
        }
        if container.is_undefined() { Err(ErrorKind::UndefinedError.into()) } else { container.get_item(key) }
    });
    environment.add_filter(SETTLED, |state: &State<'_, '_>, value: Value| settled(state, value));
    environment.add_filter(BUILT, |state: &State<'_, '_>, value: Value| {
        for entry in value.try_iter()? {
            check_data(&entry)?;
            if value.kind() == ValueKind::Map {
                check_data(&value.get_item(&entry)?)?;
            }
        }
        spend_on(state, [&value], true)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(ASSIGNED, move |operands: Rest<Value>| {
        operands.first().map_or(Ok(()), check_data)?;
        Ok::<_, Error>(back(operands))
    });
    environment.add_filter(LOOPED, |state: &State<'_, '_>, value: Value| {
        spend_on(state, Some(&value).filter(|value| value.as_str().is_some()), false)?;
        Ok::<_, Error>(value)
    });
}

/// How much of its arguments a filter, test or function reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Only the kind of each value, or one entry.
    Nothing,
    /// Text.
    Text,
    /// Text, and lists entry by entry.
    Shallow,
    /// The complete value, recursively.
    Deep,
    /// Entry by entry; the result contains new nested lists.
    Nests,
}

/// All filters, tests and functions available to templates.
fn environment<'a>() -> Environment<'a> {
    let mut environment = Environment::empty();
    environment.set_fuel(Some(FUEL));
    add_guards(&mut environment);
    macro_rules! add {
        ($add:ident, $module:ident, $reads:ident: $($name:literal = $function:ident),* $(,)?) => {
            $({
                let inner = Value::from_function($module::$function);
                environment.$add($name, move |state: &State<'_, '_>, args: Rest<Value>| {
                    bounded(state, Reads::$reads, $name, &args, |args| inner.call(state, args))
                });
            })*
        };
    }
    add!(add_filter, filters, Text: "length" = length, "count" = length, "first" = first, "last" = last,
        "default" = default, "d" = default, "attr" = attr, "safe" = safe, "upper" = upper, "lower" = lower,
        "title" = title, "capitalize" = capitalize, "trim" = trim, "split" = split, "lines" = lines, "round" = round,
        "abs" = abs, "int" = int, "float" = float, "bool" = bool);
    add!(add_filter, filters, Shallow: "list" = list, "reverse" = reverse, "select" = select, "reject" = reject,
        "selectattr" = selectattr, "rejectattr" = rejectattr, "map" = map);
    add!(add_filter, filters, Deep: "escape" = escape, "e" = escape, "replace" = replace, "dictsort" = dictsort,
        "join" = join, "min" = min, "max" = max, "sort" = sort, "string" = string, "sum" = sum, "indent" = indent,
        "unique" = unique, "format" = format);
    add!(add_filter, filters, Nests: "items" = items, "batch" = batch, "slice" = slice, "groupby" = groupby,
        "chain" = chain, "zip" = zip);
    add!(add_test, tests, Nothing: "undefined" = is_undefined, "defined" = is_defined, "none" = is_none, "safe" = is_safe,
        "escaped" = is_safe, "boolean" = is_boolean, "number" = is_number, "integer" = is_integer, "int" = is_integer,
        "float" = is_float, "string" = is_string, "sequence" = is_sequence, "iterable" = is_iterable,
        "mapping" = is_mapping, "true" = is_true, "false" = is_false);
    add!(add_test, tests, Deep: "odd" = is_odd, "even" = is_even, "divisibleby" = is_divisibleby,
        "startingwith" = is_startingwith, "endingwith" = is_endingwith, "lower" = is_lower, "upper" = is_upper,
        "sameas" = is_sameas, "eq" = is_eq, "equalto" = is_eq, "==" = is_eq, "ne" = is_ne, "!=" = is_ne, "lt" = is_lt,
        "lessthan" = is_lt, "<" = is_lt, "le" = is_le, "<=" = is_le, "gt" = is_gt, "greaterthan" = is_gt, ">" = is_gt,
        "ge" = is_ge, ">=" = is_ge, "in" = is_in, "filter" = is_filter, "test" = is_test);
    add!(add_function, functions, Deep: "dict" = dict, "namespace" = namespace);
    environment.add_function("range", functions::range);
    environment.add_function("raise_exception", |message: String| Err::<Value, _>(wrong(message)));
    environment.add_function("strftime_now", |state: &State<'_, '_>, format: String| {
        // The longest expansion of a directive is `Wednesday`, 9 bytes.
        spend(state, format.len().saturating_mul(9))?;
        super::strftime(&format, std::time::SystemTime::now())
    });
    environment.add_filter("tojson", |state: &State<'_, '_>, value: &Value, options: Kwargs| {
        let indented = options.peek::<Value>("indent").is_ok_and(|indent| indent.as_usize().is_some());
        let cost = size(value, true, 0)?;
        spend(state, cost.saturating_mul(if indented { INDENT_BYTES_MAX / ENTRY_BYTES } else { 1 }))?;
        settled(state, super::to_json(value, options)?)
    });
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        spend_on(state, [value], true)?;
        escape_formatter(out, state, value)
    });
    environment
}

fn bounded(
    state: &State<'_, '_>,
    reads: Reads,
    name: &str,
    args: &[Value],
    call: impl FnOnce(&[Value]) -> Result<Value, Error>,
) -> Result<Value, Error> {
    match reads {
        Reads::Nothing => {}
        Reads::Text => spend_on(state, args.iter().filter(|arg| arg.as_str().is_some()), false)?,
        Reads::Shallow | Reads::Nests => spend_on(state, args, false)?,
        Reads::Deep => spend_on(state, args, true)?,
    }
    spend(state, growth(name, args)?)?;
    if matches!(name, "dict" | "namespace") {
        for value in args.iter().flat_map(|arg| arg.try_iter().into_iter().flatten().map(move |key| arg.get_item(&key)))
        {
            check_data(&value?)?;
        }
    }
    let result = settled(state, call(args)?)?;
    if reads == Reads::Nests {
        spend_on(state, [&result], true)?;
    }
    Ok(result)
}

/// Python's methods of strings, maps and lists.
fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
    // The filter takes the separator second.
    let filter_args = if name == "join" { all.iter().rev().cloned().collect() } else { all };
    let reads = if matches!(name, "get" | "items" | "keys" | "values") { Reads::Shallow } else { Reads::Deep };
    bounded(state, reads, name, &filter_args, |_| {
        if name == "count"
            && let (Some(text), [what]) = (value.as_str(), args)
            && what.as_str() == Some("")
        {
            // As in Python: the empty string occurs between all characters. The crate's own loop would never end.
            return Ok(Value::from(text.chars().count() + 1));
        }
        unknown_method_callback(state, value, name, args)
    })
}

/// Bytes of a result, or of intermediate data, in excess of the arguments.
fn growth(name: &str, args: &[Value]) -> Result<usize, Error> {
    let text = |index: usize| args.get(index).and_then(Value::as_str).unwrap_or_default();
    let entries = |index: usize| -> Result<usize, Error> {
        let Some(value) = args.get(index) else { return Ok(0) };
        Ok(value.as_str().map_or(size(value, false, 0)? / ENTRY_BYTES, |text| text.chars().count()))
    };
    Ok(match name {
        "replace" => {
            let whole = args.first().map(ToString::to_string).unwrap_or_default();
            let found = if text(1).is_empty() { whole.chars().count() + 1 } else { whole.matches(text(1)).count() };
            found.saturating_mul(args.get(2).map_or(0, |new| new.to_string().len()))
        }
        "join" => entries(0)?.saturating_mul(text(1).len()),
        "indent" => {
            let width = args.iter().skip(1).map(|arg| arg.as_str().map_or(0, str::len)).fold(numbers(args), usize::max);
            (text(0).matches('\n').count() + 1).saturating_mul(width)
        }
        "format" => {
            // Each directive may be as wide as any number in the arguments, and may repeat any argument.
            let widest = text(0).split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let widest = widest.map(|digits| digits.parse().unwrap_or(usize::MAX)).fold(numbers(args), usize::max);
            let arguments =
                args.iter().skip(1).try_fold(0usize, |sum, arg| Ok::<_, Error>(sum + size(arg, true, 0)?))?;
            text(0).matches(['%', '{']).count().saturating_mul(widest.saturating_add(arguments))
        }
        "split" => {
            let pieces =
                if text(1).is_empty() { text(0).split_whitespace().count() } else { text(0).matches(text(1)).count() };
            (pieces + 1).saturating_mul(ENTRY_BYTES)
        }
        "lines" | "splitlines" => (text(0).matches('\n').count() + 1).saturating_mul(ENTRY_BYTES),
        "batch" | "slice" => numbers(args).saturating_mul(ENTRY_BYTES),
        // Text is iterated by character.
        "chain" | "zip" => {
            let texts = args.iter().filter_map(Value::as_str);
            texts.map(|text| text.chars().count()).sum::<usize>().saturating_mul(ENTRY_BYTES)
        }
        "list" | "sort" | "unique" | "map" | "select" | "reject" | "min" | "max" | "groupby" | "sum" => {
            text(0).chars().count().saturating_mul(ENTRY_BYTES)
        }
        _ => 0,
    })
}

/// The greatest integer among the arguments, keyword arguments included.
fn numbers(args: &[Value]) -> usize {
    let of = |value: &Value| value.as_usize().unwrap_or(0);
    let named = |value: &Value| {
        let keys = (value.kind() == ValueKind::Map).then(|| value.try_iter().ok()).flatten();
        keys.into_iter()
            .flatten()
            .filter_map(|key| value.get_item(&key).ok())
            .map(|value| of(&value))
            .max()
            .unwrap_or(0)
    };
    args.iter().map(|value| of(value).max(named(value))).max().unwrap_or(0)
}
