import embed from "vega-embed";
import { expressionInterpreter } from "vega-interpreter";

globalThis.embedChart = (element, spec, options) =>
  embed(element, spec, { ast: true, expr: expressionInterpreter, ...options });
