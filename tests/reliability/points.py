"""The functions on a request's way that are made to raise: the process, the module, the name."""

SERVER = """
hex_llm.text.tokenizer:Tokenizer.encode
hex_llm.text.chat:encode_chat
hex_llm.server.openai.schemas:OpenAIRequest.params
hex_llm.admission:make_request
hex_llm.frontend.client:EngineClient._prepare
hex_llm.frontend.requests:OpenRequests.add
hex_llm.frontend.requests:OpenRequests.take
hex_llm.frontend.requests:OpenRequests._take_updates
hex_llm.frontend.link:EngineLink.send
hex_llm.ipc.protocol:encode
hex_llm.ipc.protocol:Reader.decode
hex_llm.text.detokenize:Detokenizer.add
hex_llm.frontend.outputs:OutputCollector.add
hex_llm.frontend.outputs:OutputCollector.deltas
hex_llm.frontend.outputs:OutputCollector.output
hex_llm.server.openai.replies:ChunkStream._chunks_of
hex_llm.server.openai.logprobs:CompletionLogprobs.add
hex_llm.server.metrics:Metrics.began
hex_llm.server.metrics:Metrics.stepped
hex_llm.server.metrics:Metrics.ended
hex_llm.server.metrics:Metrics.answered
hex_llm.logs:TextLines.formatMessage
"""
ENGINE = """
hex_llm.ipc.protocol:encode
hex_llm.ipc.protocol:Reader.decode
hex_llm.engine.engine:Engine.add
hex_llm.engine.book:RequestBook._begin
hex_llm.engine.engine:Engine.step
hex_llm.engine.engine:Engine.stats
hex_llm.engine.engine:Stepper._write_slots
hex_llm.engine.engine:Stepper._record
hex_llm.engine.book:RequestBook.tell
hex_llm.engine.book:RequestBook._follow
hex_llm.scheduling.scheduler:Scheduler.schedule
hex_llm.scheduling.scheduler:Scheduler.collect
hex_llm.execution.batch:pack
hex_llm.execution.step_runner:StepRunner.dispatch
hex_llm.execution.step_runner:StepRunner.read
hex_llm.execution.runner:Runner.write_slots
hex_llm.text.grammar:GrammarFactory.submit
hex_llm.text.grammar:Matcher.mask
hex_llm.text.grammar:Matcher.accept
hex_llm.engine.constraints:Constraint.words
"""
POINTS = [f"server {one}" for one in SERVER.split()] + [f"engine {one}" for one in ENGINE.split()]
