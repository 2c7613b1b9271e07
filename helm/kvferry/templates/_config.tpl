{{- /* The sidecar's settings, all of them: docs/configuration.md. */ -}}
{{- define "kvferry.settings" -}}
run_dir: {{ include "kvferry.runDir" . }}
tiers:
  host:
    bytes: {{ printf "%dMiB" (include "kvferry.mebibytes" (dict "key" "pool.size" "value" .Values.pool.size) | int64) }}
    name: {{ include "kvferry.poolName" . }}
    {{- if .Values.pool.hugepages }}
    hugepages_dir: {{ include "kvferry.poolDir" . }}
    {{- end }}
    {{- if .Values.pool.keysMax }}
    keys_max: {{ int64 .Values.pool.keysMax }}
    {{- end }}
  {{- if .Values.disk.size }}
  disk:
    bytes: {{ printf "%dMiB" (include "kvferry.mebibytes" (dict "key" "disk.size" "value" .Values.disk.size) | int64) }}
    paths: {{ include "kvferry.diskDir" . }}
    policy: {{ .Values.disk.policy }}
  {{- end }}
  {{- with include "kvferry.remoteUrl" . }}
  remote:
    url: {{ . | quote }}
    {{- with $ }}
    policy: {{ .Values.remote.policy }}
    ttl_s: {{ int64 .Values.remote.ttlSeconds }}
    {{- if .Values.remote.password.existingSecret }}
    password_file: {{ include "kvferry.secretsDir" . }}/store/password
    {{- end }}
    {{- if not (hasPrefix "redis" (include "kvferry.remoteUrl" .)) }}
    protocol: {{ .Values.remote.protocol }}
    {{- end }}
    {{- if hasPrefix "dfkv" (include "kvferry.remoteUrl" .) }}
    library: {{ required "remote.dfkv.library: give the path of the cluster's libdfkv.so" .Values.remote.dfkv.library | quote }}
    {{- end }}
    {{- if hasPrefix "mooncake:" (include "kvferry.remoteUrl" .) }}
    {{- if eq .Values.remote.protocol "rdma" }}
    device: {{ required "remote.mooncake.device: rdma needs a device, for example mlx5_0" .Values.remote.mooncake.device | quote }}
    {{- end }}
    replicas: {{ int64 .Values.remote.mooncake.replicas }}
    {{- with .Values.remote.mooncake.segmentSize }}
    segment_bytes: {{ printf "%dMiB" (include "kvferry.mebibytes" (dict "key" "remote.mooncake.segmentSize" "value" .) | int64) }}
    {{- end }}
    {{- end }}
    {{- end }}
  {{- end }}
{{- with .Values.tenants.bound }}
{{- if or (ne $.Values.mode "daemonset") (ne (int64 $.Values.user) 0) $.Values.engine.enabled }}
{{- fail "tenants.bound needs mode daemonset, user 0 and engine.enabled false: a sidecar that serves several users is root, and engines run as none of them" }}
{{- end }}
namespaces:
  bound: {{ . | quote }}
{{- end }}
copy:
  threads: {{ int64 .Values.sidecar.copyThreads }}
  {{- if .Values.gpu.serve }}
  {{- if eq .Values.gpu.access "none" }}
  {{- fail "gpu.serve needs a gpu.access other than none: the sidecar would see no GPU" }}
  {{- end }}
  gpu: true
  {{- end }}
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

{{- define "kvferry.remoteUrl" -}}
{{- if and .Values.remote.mooncake.master.enabled .Values.remote.url -}}
{{- fail "remote.url and remote.mooncake.master.enabled name two stores: leave one out" -}}
{{- else if and .Values.remote.mooncake.master.enabled (not .Values.remote.mooncake.segmentSize) -}}
{{- fail "remote.mooncake.segmentSize is empty: a store whose sidecars give it no memory holds nothing" -}}
{{- else if .Values.remote.mooncake.master.enabled -}}
mooncake://{{ include "kvferry.fullname" . }}-mooncake:{{ int64 .Values.remote.mooncake.master.port }}
{{- else -}}
{{ .Values.remote.url }}
{{- end -}}
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
{{- if ne (float64 (int64 $value)) $value }}{{ fail (printf "sidecar.config.%s%s is %v: settings are whole numbers" $prefix $key $value) }}{{ end -}}
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
