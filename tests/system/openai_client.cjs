// Tests a node with OpenAI's own client for JavaScript. Usage: node openai_client.cjs BASE_URL MODEL
//
// Prints one line per check; exits with an error at the first failed check.
"use strict";

const OpenAI = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: "Name the capital of France." }];

function check(name, condition, seen = "") {
    console.log(`${condition ? "ok" : "WRONG"}: ${name} ${JSON.stringify(seen)}`);
    if (!condition) process.exit(1);
}

async function main() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0 });
    const text = whole.choices[0].message.content;
    check("a chat completes", text.includes("Paris"), text);

    let streamed = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0, stream: true })) {
        streamed += chunk.choices[0]?.delta?.content ?? "";
    }
    check("a stream has the same text", streamed === text, streamed);

    const parameters = {
        type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false,
    };
    let asked = 0;
    const weather = {
        type: "function",
        function: {
            name: "weather", description: "The weather in a city", parameters, parse: JSON.parse,
            function: ({ city }) => { asked += typeof city === "string"; return "7 C, rain"; },
        },
    };
    const about = [{ role: "user", content: "What is the weather in Oslo?" }];
    const choice = { type: "function", function: { name: "weather" } };
    const runner = client.chat.completions.runTools({ model, messages: about, tools: [weather], tool_choice: choice, max_tokens: 60, temperature: 0 });
    await runner.done();
    check("the client runs the tool of choice", asked === 1, runner.messages);

    const response = await client.responses.create({ model, input: messages, max_output_tokens: 24, temperature: 0 });
    check("a response has the same text", response.output_text === text && response.status === "completed", response.output_text);
    const names = [];
    const stream = client.responses.stream({ model, input: messages, max_output_tokens: 24, temperature: 0 });
    for await (const event of stream) names.push(event.type);
    const last = await stream.finalResponse();
    check("a streamed response has the same text", last.output_text === text, last.output_text);
    check("its events are in order", names[0] === "response.created" && names.at(-1) === "response.completed", names);

    const refused = await client.responses.create({ model, input: "Hi", previous_response_id: "resp_1" }).catch((error) => error);
    check("a stored response is refused", refused instanceof OpenAI.BadRequestError && refused.param === "previous_response_id", refused.message);
    console.log("all ok");
}

main().catch((error) => {
    console.log(`WRONG: ${error.stack}`);
    process.exit(1);
});
