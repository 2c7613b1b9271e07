{{- /* The sidecar's settings, all of them: docs/configuration.md. */ -}}
{{- define "kvferry.settings" -}}
run_dir: {{ include "kvferry.runDir" . }}
tiers:
  host:
    bytes: {{ printf "%dMiB" (include "kvferry.mebibytes" (dict "key" "pool.size" "value" .Values.pool.size) | int64) }}
    name: {{ include "kvferry.poolName" . }}
    {{- if .Values.pool.keysMax }}
    keys_max: {{ int64 .Values.pool.keysMax }}
    {{- end }}
  {{- if .Values.disk.size }}
  disk:
    bytes: {{ printf "%dMiB" (include "kvferry.mebibytes" (dict "key" "disk.size" "value" .Values.disk.size) | int64) }}
    paths: {{ include "kvferry.diskDir" . }}
    policy: {{ .Values.disk.policy }}
  {{- end }}
  {{- if .Values.remote.url }}
  remote:
    url: {{ .Values.remote.url | quote }}
    policy: {{ .Values.remote.policy }}
    ttl_s: {{ int64 .Values.remote.ttlSeconds }}
    {{- if .Values.remote.password.existingSecret }}
    password_file: {{ include "kvferry.secretsDir" . }}/store/password
    {{- end }}
  {{- end }}
copy:
  threads: {{ int64 .Values.sidecar.copyThreads }}
http:
  listen: {{ .Values.http.listen | quote }}
  probes_listen: {{ printf "%s:%d" .Values.http.probesAddress (int64 .Values.http.probesPort) | quote }}
  {{- if .Values.http.token.existingSecret }}
  token_file: {{ include "kvferry.secretsDir" . }}/http/token
  {{- end }}
log:
  level: {{ .Values.sidecar.logLevel }}
  format: json
limits:
  drain_ms_max: {{ mul 1000 (int64 .Values.sidecar.drainSeconds) }}
{{- end }}

{{- define "kvferry.toml" -}}
{{- $settings := include "kvferry.settings" . | fromYaml -}}
{{- include "kvferry.tomlTable" (dict "prefix" "" "table" (mustMergeOverwrite $settings (deepCopy .Values.sidecar.config))) -}}
{{- end }}

{{- /* Dotted keys, one a line. Not toToml: it writes numbers of values.yaml as floats. */ -}}
{{- define "kvferry.tomlTable" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .table -}}
{{- if kindIs "map" $value -}}
{{- include "kvferry.tomlTable" (dict "prefix" (printf "%s%s." $prefix $key) "table" $value) -}}
{{- else if kindIs "float64" $value -}}
{{- printf "%s%s = %d\n" $prefix $key (int64 $value) -}}
{{- else -}}
{{- printf "%s%s = %s\n" $prefix $key (mustToRawJson $value) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What vLLM is told. A failed load must be computed: vLLM's own default ends the request. */ -}}
{{- define "kvferry.transferConfig" -}}
{{- $extra := mustMergeOverwrite (deepCopy .Values.connector.config) (dict "run_dir" (include "kvferry.runDir" .)) -}}
{{- dict "kv_connector" "FerryConnector" "kv_connector_module_path" "kvferry_connector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra | mustToRawJson -}}
{{- end }}
