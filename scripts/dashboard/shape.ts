// What Grafana publishes of the shape of a dashboard, put together: the panels with the
// options of their type, which Grafana's own type of a dashboard leaves open.
import type * as grafana from "@grafana/schema";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as stateTimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON writes an enum of texts as its text.
type Plain<T> = T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer E)[] ? Plain<E>[]
  : unknown extends T ? T
  : { [K in keyof T]: Plain<T[K]> };

type DataSource = { type: "prometheus"; uid: "${datasource}" };

// Of Prometheus' queries Grafana publishes no such types.
type Target = {
  refId: string;
  datasource: DataSource;
  expr: string;
  editorMode: "code";
  format?: "table" | "time_series";
  legendFormat?: string;
} & ({ instant: true; range: false } | { instant: false; range: true });

type Transformation = {
  id: "organize";
  options: {
    excludeByName: Record<string, boolean>;
    indexByName: Record<string, number>;
    renameByName: Record<string, string>;
  };
};

type Panel<Type extends string, Options, Custom> =
  & Required<Pick<grafana.Panel, "id" | "title" | "description" | "gridPos">>
  & Pick<grafana.Panel, "interval" | "maxDataPoints" | "links" | "timeFrom">
  & {
    type: Type;
    datasource: DataSource;
    targets: Target[];
    transformations?: Transformation[];
    options: Plain<Options>;
    fieldConfig: {
      defaults: Plain<Omit<grafana.FieldConfig, "custom">> & { custom?: Plain<Custom> };
      overrides: Plain<grafana.FieldConfigSource["overrides"]>;
    };
  };

type AnyPanel =
  | Panel<"stat", stat.Options, never>
  | Panel<"table", table.Options, table.FieldConfig>
  | Panel<"state-timeline", stateTimeline.Options, stateTimeline.FieldConfig>
  | Panel<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Plain<grafana.RowPanel>;

export type Dashboard =
  & Plain<Omit<grafana.Dashboard, "panels" | "templating">>
  & { panels: AnyPanel[]; templating: { list: Plain<grafana.VariableModel>[] } };

// One that is right, and that the others are refused: the types above came, and say something.
const rest: Omit<Panel<"stat", stat.Options, never>, "type" | "options"> = {
  id: 1, title: "", description: "", gridPos: { x: 0, y: 0, w: 1, h: 1 },
  datasource: { type: "prometheus", uid: "${datasource}" }, targets: [], fieldConfig: { defaults: {}, overrides: [] },
};
const options: Plain<stat.Options> = {
  colorMode: "value", graphMode: "none", justifyMode: "auto", orientation: "auto", textMode: "value", wideLayout: true,
  showPercentChange: false, percentChangeColorMode: "standard", reduceOptions: { calcs: [] },
};
({ ...rest, type: "stat", options }) satisfies AnyPanel;
// @ts-expect-error: no such panel
({ ...rest, type: "graph", options }) satisfies AnyPanel;
// @ts-expect-error: no such option
({ ...rest, type: "stat", options: { ...options, colourMode: "value" } }) satisfies AnyPanel;
// @ts-expect-error: no such value
({ ...rest, type: "stat", options: { ...options, colorMode: "loud" } }) satisfies AnyPanel;
// @ts-expect-error: no such kind of variable
({ schemaVersion: 39, panels: [], templating: { list: [{ name: "a", type: "queri" }] } }) satisfies Dashboard;
// @ts-expect-error: no such field
({ schemaVersion: 39, panels: [], templating: { list: [] }, titel: "" }) satisfies Dashboard;
